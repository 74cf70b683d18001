import json

import pytest
import trained
from typer.testing import CliRunner

from workbench.cli.app import app
from workbench.errors import InputError
from workbench.studies import cache_reuse


@pytest.fixture(autouse=True)
def few_contexts(monkeypatch):
    monkeypatch.setattr(cache_reuse, "contexts", lambda block: [block - 1, 1000])


def run(exports, *arguments, code=0) -> dict:
    bundle = trained.decoder(exports, "tiny-llama").bundle.root
    result = CliRunner().invoke(
        app, ["reuse", str(bundle), *arguments, "--max-new", "2", "--json"]
    )
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_reuse_prints_every_cell_and_its_verdict(exports):
    found = run(
        exports,
        "--batch-bundle",
        str(trained.decoder(exports, "tiny-llama", trained.BATCH).bundle.root),
    )
    assert found["verdict"] == "GREEN" and len(found["cells"]) == 2 * 2 * 2 * 3 * 2
    assert all(
        {
            "batch",
            "cache",
            "streaming",
            "context",
            "format",
            "tokens",
            "verdict",
            "reason",
        }
        == c.keys()
        for c in found["cells"]
    )
    assert {c["verdict"] for c in found["cells"] if c["context"] == 1000} == {"not_run"}


def test_a_red_cell_exits_1(exports, monkeypatch):
    monkeypatch.setattr(cache_reuse, "differs", lambda *arguments, **_: "planted")
    found = run(exports, code=1)
    assert found["verdict"] == "RED" and "planted" in {
        c["reason"].rpartition(": ")[2] for c in found["cells"]
    }


def test_bundles_that_do_not_belong_together_exit_2(exports):
    pair = [str(trained.decoder(exports, "tiny-llama").bundle.root)] * 2
    other = str(trained.decoder(exports, "tiny-llama", max_seq_len=64).bundle.root)
    result = CliRunner().invoke(app, ["reuse", pair[0], "--batch-bundle", other])
    assert isinstance(result.exception, InputError) and "--batch alone" in str(
        result.exception
    )


def test_decode_samples_as_told(exports):
    def tokens(*arguments):
        bundle = str(trained.decoder(exports, "tiny-llama").bundle.root)
        result = CliRunner().invoke(
            app,
            [
                "decode",
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
