"""The base class of all parts of the manifest, and the types that several of them share.
Imports nothing of the workbench."""

from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class ManifestModel(BaseModel):
    """A part of the manifest: immutable, and without unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _check_inside(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or {"/", ".."} & set(parts) or "\0" in path:
        raise ValueError(f"path {path!r} must stay inside the bundle")
    return path


RelativePath = Annotated[str, Field(max_length=512), AfterValidator(_check_inside)]
NonNegative = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]  # Core ML's shapes are no larger
