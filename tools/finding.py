"""The record that the audits share."""

from typing import NamedTuple


class Finding(NamedTuple):
    """A published number that differs from the computed one."""

    place: str
    label: str
    published: str
    computed: str

    def __str__(self) -> str:
        return f"{self.place}: {self.label}: {self.published}; computed {self.computed}"
