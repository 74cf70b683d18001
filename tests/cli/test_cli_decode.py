import json

import trained
from typer.testing import CliRunner

from workbench.cli.app import app


def test_generate_samples_as_told(exports):
    def tokens(*arguments):
        bundle = str(trained.decoder(exports, "tiny-llama").bundle.root)
        result = CliRunner().invoke(
            app,
            [
                "generate",
                bundle,
                "--prompt-ids",
                "1,4,69",
                "--max-new",
                "8",
                "--json",
                *arguments,
            ],
        )
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["tokens"]

    warm = ("--temperature", "3", "--top-k", "40", "--top-p", "0.9")
    assert (
        tokens(*warm, "--seed", "1")
        == tokens(*warm, "--seed", "1")
        != tokens(*warm, "--seed", "2")
    )
    assert tokens() == tokens("--temperature", "1", "--top-k", "1")
