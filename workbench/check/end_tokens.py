"""The tokens that end a text, as a checkpoint names them in three places.

transformers' `generate` stops at those of generation_config.json, and at those of
config.json where there is no such file. The chat template ends an answer by a token of
its own. Where the three contradict each other, a text may not end where its author meant
it to; the exporter has no part in that."""

from collections.abc import Callable
from dataclasses import dataclass

from workbench.decode.tokenizer import end_of_answer, token_labels
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint


@dataclass(frozen=True)
class EndTokens:
    """The end tokens that a checkpoint names.

    Attributes:
        configuration: of config.json.
        generation: of generation_config.json; None without that file.
        template: the token behind an answer in the chat template; None where the
            template writes none.
        has_template: whether there is a template that renders an answer.
    """

    configuration: list[int]
    generation: list[int] | None
    template: int | None
    has_template: bool

    @property
    def stop(self) -> list[int]:
        """Those at which `generate` stops."""
        return self.configuration if self.generation is None else self.generation

    def contradictions(self, label: Callable[[int], str]) -> list[str]:
        """What contradicts what, a clause each.

        Args:
            label: token id → its text.
        """
        clauses = []
        lost = sorted(set(self.configuration) - set(self.stop))
        if lost:
            clauses.append(
                f"config.json ends texts with {', '.join(map(label, lost))}, and "
                "generation_config.json does not"
            )
        if self.has_template and self.template is None:
            clauses.append("the chat template ends an answer without an end token")
        elif self.template is not None and self.template not in self.stop:
            clauses.append(
                f"the chat template ends an answer with {label(self.template)}, at "
                "which generation does not stop"
            )
        return clauses

    def json(self) -> dict:
        """The field `end_tokens` of `stop` in the JSON of `workbench validate`."""
        return {
            "configuration": self.configuration,
            "generation": self.generation,
            "template": self.template,
        }


def read_end_tokens(checkpoint: Checkpoint) -> EndTokens:
    """The end tokens of a checkpoint.

    Raises:
        InputError: end tokens that are no token ids.
    """
    tokens = checkpoint.tokens
    configuration, generation = tokens.configured_eos, tokens.generation_eos
    try:
        template, has_template = end_of_answer(checkpoint.tokenizer), True
    except InputError:  # no tokenizer, no template, or one that renders no answer
        template, has_template = None, False
    return EndTokens(configuration, generation, template, has_template)


def describe_contradictions(ends: EndTokens, checkpoint: Checkpoint) -> str:
    """One sentence; empty where nothing contradicts anything."""

    def label(token: int) -> str:
        (text,) = token_labels(checkpoint.tokenizer, [token])
        return str(token) if text == str(token) else f"{token} {text!r}"

    clauses = ends.contradictions(label)
    if not clauses:
        return ""
    return (
        f"the checkpoint contradicts itself about where a text ends: "
        f"{'; '.join(clauses)}"
    )
