"""Bad input: one message that names it and the next step, exit code 2, and nothing left behind.
Paths that lead elsewhere are in test_cli_paths.py."""

import shlex
import shutil
from pathlib import Path

import pytest
from in_process import cli, invoke
from tiny import DATA

from workbench.cli import main
from workbench.cli.experiments import _notebook_settings
from workbench.cli.spellings import OLD_OPTIONS

# In commands: {tiny} a checkpoint, {bundle} a bundle, {some_text} a file of words that its tokenizer
# does not know, {data} the folder data/.
MIXED = "export {tiny} out --compress mixed --calibrate {data}/tasks/heldout.txt"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("export {tiny} out --max-seq-len 0", "max_seq_len"),
        ("export {tiny} out --compress int8", "lut6-g16, lut4-g8"),
        ("export {tiny} out --compress int8", "did you mean int8-channel?"),
        ("export {tiny} out --tokens 0", "needs numbers from 1 on, in a form like 1-4"),
        ("export {tiny} out --tokens '1;2'", "1-4, 4 or 1,64"),
        ("export {tiny} out --compress mixed --max-kl 0.05", "data/calibration.txt"),
        (MIXED, "found no target"),
        (MIXED + " --max-kl 0.05 --bytes 1M", "--max-kl and --bytes"),
        (MIXED + " --ms-on M4 --bytes 1M", "--bytes and --ms-on"),
        (MIXED + " --max-kl -1", "--max-kl"),
        (MIXED + " --max-kl 0.05 --select nowhere", "nowhere"),
        (
            MIXED + " --max-kl 0.05 --select {some_text} --select-ids {some_text}",
            "--select, --select-ids: found both; needs one",
        ),
        (MIXED + " --max-kl 0.05 --select {some_text}", "unknown to the tokenizer"),
        ("export {tiny} out --max-kl 0.05", "leave --max-kl out"),
        ("export {tiny} out --bytes 1M", "leave --bytes out"),
        ("export {tiny} out --compress fp16 --ms-on M4", "leave --ms-on out"),
        ("export {tiny} out --select {some_text}", "leave --select out"),
        ("export {tiny} out --select-ids {some_text}", "leave --select-ids out"),
        ("plan {tiny} --compress mixed", "not chosen yet"),
        ("exprot {tiny} out", "workbench: command: found 'exprot'; needs one of"),
        ("explain op {bundle} --reduce {bundle}", "needs a folder outside the bundle"),
        (
            "explain op {bundle} --reduce {bundle}/x",
            "needs a folder outside the bundle",
        ),
        ("generate {bundle} --prompt-ids 1 --max-new 0", "--logits FILE"),
        ("report 31 --html new/x.html", "found no folder new"),
        ("report {bundle} --html new/x.html", "found no folder new"),
        ("sweep nowhere.yaml", "grid"),
        ("sweep {bundle} --T '1;2'", "run.T.0: '1;2'"),
        ("report 99", "99"),
        ("run", "run: found no NUMBERS; needs the numbers of experiments"),
        ("report 30x", "needs a bundle's folder, or the number of an experiment"),
        (
            "explain build/x ranges",
            "explain: found ranges behind build/x; needs the subcommand ranges before its "
            "arguments. Next: write: workbench explain ranges build/x",
        ),
        ("doctor x", "doctor: found the extra argument x; needs no further argument"),
        ("plan {tiny} --verify 4", "Next: add --draft-acceptance SHARE"),
        (
            "sweep {bundle} --T 9",
            "needs a number from 1 to 4, the most tokens of a call",
        ),
        ("log unpack {some_text}", "found no readable zip"),
        ("generate {bundle} --prompt a --text b", "prompt: found --prompt, --text;"),
        ("plan {tiny} --memory lots", "lots"),
        ("plan {tiny} --memory 0", "above zero"),
        ("plan {tiny} --tokens 4-1", "tokens"),
        ("plan {tiny} --chip M9", "M9"),
        ("plan {tiny} --moe routed", "moe = routed"),
        ("generate {bundle} --prompt-ids 1 --top-k 4", "--temperature above 0"),
        pytest.param(
            "generate {bundle} --prompt-ids 1 --runtime stand-in --precision exact",
            "the portable runtime",
            marks=pytest.mark.shim,
        ),
        ("validate {bundle} --min-agreed 2", "--min-agreed: found 2.0"),
        ("validate {bundle} --min-stops -0.1", "--min-stops: found -0.1"),
        ("golden {tiny} --out .", "--out"),
        ("golden {tiny} --out /proc/x/g", "--out"),
        ("golden {tiny} --out new/g --prompt-ids ''", "prompt ids"),
        ("golden {tiny} --out new/g --prompt-ids 1,256", "from 0 to 255"),
        ("golden {tiny} --out g --prompt get --prompt-ids 1", "one of --prompt"),
        ("run 34 --set T=1", "inside a checkout"),
        ("run 34 --publish --beside", "--publish, --beside: found both"),
        (
            "validate {bundle} --golden {some_text} --tasks {data}/tasks/heldout.jsonl",
            "--checkpoint",
        ),
        ("validate {bundle} --checkpoint {tiny} --max-kl -1", "--max-kl"),
        (
            "validate units {bundle} --checkpoint {tiny} --tasks {data}/tasks/heldout.jsonl",
            "--tasks",
        ),
        ("validate {bundle} --single-copy", "leave --single-copy out"),
        ("validate units {bundle}", "--golden"),
        ("validate units {bundle} --golden {some_text} --single-copy", "--single-copy"),
        ("validate units {bundle} --golden {some_text} --prompt-ids 1", "--prompt-ids"),
        ("validate {bundle} --prompt-ids 1", "--golden"),
        ("validate {bundle} --tokens 4", "--golden"),
        ("validate {bundle} --golden {some_text} --prompt-ids 1", "--prompt-ids"),
        ("validate units {bundle} --precision exact", "--precision"),
        ("validate units {bundle} --compute-units CPU_ONLY", "--compute-units"),
        ("validate {bundle} --compute-units NE", "--compute-units"),
        ("explain {bundle}", "explain ranges BUNDLE"),
        ("explain parts {bundle}", "--checkpoint"),
        ("explain variant {bundle}", "--checkpoint"),
        ("explain part {bundle} --checkpoint {tiny}", "parts, variant, ranges, op"),
        ("explain opp {bundle}", "did you mean op?"),
        ("validate unit {bundle}", "did you mean units?"),
        ("log compar a b", "did you mean compare?"),
        ("explain {bundle} --layer 0", "--layer"),
        ("explain {bundle} --position 0", "--position"),
        ("explain {bundle} --reduce out", "--reduce"),
        ("explain ranges {bundle} --layer 0", "--layer"),
        ("explain ranges {bundle} --checkpoint {tiny}", "--checkpoint"),
        ("explain variant {bundle} --checkpoint {tiny} --runtime coreml", "--runtime"),
        ("explain op {bundle} --checkpoint {tiny}", "--checkpoint"),
        ("explain op parts {bundle}", "no further argument"),
        ("explain {bundle}/head_00.mlpackage --checkpoint {tiny}", "--checkpoint"),
        ("explain {bundle}/head_00.mlpackage --prompt-ids 1", "--prompt-ids"),
        ("explain ranges {bundle}/head_00.mlpackage --prompt-ids 1", "--prompt-ids"),
        ("log compare a b out.zip", "no further argument"),
        ("log compare a b --rows", "--rows"),
        ("log compare a", "RUN_B"),
        ("log a", "compare, pack, unpack"),
        ("log unpack {some_text} --where 'T == 1'", "--where"),
        ("log pack out.zip --rows", "--rows"),
        ("log pack /proc/x/y.zip", "log pack"),
        ("log pack {tiny}", "a folder"),
        (
            "log --sort speed",
            "--sort: found 'speed'; needs the name of a column. Next: workbench log --json",
        ),
        ("log --log nowhere", "--log nowhere: found no such folder; needs the folder"),
        ("log --log {some_text}", "found a file; needs the folder of a log"),
        ("report {bundle} --html {weights}", "found another file that is there; needs"),
        ("report {bundle} --markdown {weights}", "one that ends in .md or"),
        ("log --sort token_s", "did you mean tokens, tokens_per_s or min_tokens?"),
        ("log --where 'checkpoin == 1'", "did you mean checkpoint or checkpoint_hash?"),
        (
            "--verson",
            "found --verson; needs a command, or an option: --help, --version.",
        ),
        ("--verson", "did you mean --version?"),
        ("--no-such", "Next: see workbench --help."),
        ("log compare a b", "run a: found"),
        ("sweep first-light --T 4", "--T"),
        ("sweep {data}/grid.yaml --runtime portable", "--runtime"),
        ("plan {bundle} --max-seq-len 64", "--max-seq-len"),
        ("plan {tiny} --runtime coreml", "--runtime"),
        ("generate {bundle}", "one of them"),
        (
            "generate {bundle} --prompt-ids 1" + 32 * ",1",
            "prompt of 33 tokens: found 1 too many; needs at most 32 tokens",
        ),
        (
            "generate {bundle} --prompt-ids 1,2,3 --max-new 31",
            "found room for 30 new tokens, 31 asked for; needs at most 32 tokens together",
        ),
        (
            "generate {bundle} --prompt-ids 1,2 --max-new 31 --logits l.npy",
            "Next: lower --max-new to 30, shorten",
        ),
        (
            "generate {bundle} --prompt-ids 1,9999",
            "--prompt-ids: found 9999 at place 2; needs token ids from 0 to 255: the "
            "vocabulary has 256 tokens. Next: correct the id",
        ),
        ("evaluate {bundle} --prompt-ids=-1,2", "--prompt-ids: found -1 at place 1;"),
        (
            "generate {bundle} --prompt-ids 1 --max-new 4 --logits /proc/l.npy",
            "--logits",
        ),
        ("generate {bundle} --prompt-ids ²", "a whole number"),
        ("generate {bundle} --prompt-ids 1 --tokens -1", "--tokens"),
        ("generate {bundle} --prompt-ids 1 --max-new -3", "--max-new"),
        ("generate {bundle} --chat --prompt-ids 1,2", "--prompt"),
        (
            "evaluate {bundle} --T 1",
            "evaluate: found --T; needs an option of this command. Next:",
        ),
        ("export {tiny} out --compres fp16", "did you mean --compress?"),
        ("export {tiny}", "export: found no BUNDLE; needs this argument."),
        ("golden {tiny}", "golden: found no --out; needs this option."),
        (
            "generate {bundle} --max-new",
            "found --max-new without a value; needs a value behind --max-new.",
        ),
        (
            "validate {bundle} --checkpoint {tiny} --prompts {some_text}",
            "needs --transcript. Next: add --transcript, or leave --prompts out",
        ),
        (
            "export {tiny} out --max-seq-len 100000",
            "found a llama checkpoint with 1024 positions; needs at most 1024,",
        ),
        ("generate {bundle} --max-new abc", "found abc; needs a whole number. Next:"),
        ("validte {bundle}", "did you mean validate?"),
        (
            "validate {bundle} --max-kl -1",
            "--max-kl: found -1.0; needs a number from 0. Next:",
        ),
        ("generate {bundle} --prompt a --prompt b", "found several values; needs one."),
        (
            "generate {bundle} --prompt-ids 1 --temperature -1",
            "--temperature: found -1",
        ),
        ("log --where \"compres == 'fp16'\"", "did you mean compress or"),
        ("validate {bundle} --precision exakt", "Next: did you mean exact? If not, "),
        ("generate {bundle} --prompt a --runtime portabel", "did you mean portable?"),
        ("plan {tiny} --chip 'M4 Maxx'", "did you mean M4 Max? If not, name one"),
        ("generate {bundle} 'A ferry'", "Next: write --prompt 'A ferry'."),
        ("export {data} out", "Next: did you mean {data}/"),
        (
            "export {tiny} out --target nope",
            "found no installed package that offers it",
        ),
        (
            "sweep first-lite",
            "found no such file; needs a YAML file. Next: did you mean",
        ),
        ("sweep {weights}", "found not UTF-8; needs a YAML file"),
        ("log pack out.zip --log nowhere", "--log nowhere: found no such folder"),
        ("log compare a b --log nowhere", "--log nowhere: found no such folder"),
        (
            "log unpack none.zip",
            "packed log none.zip: found no such file; needs a file",
        ),
        ("export {tiny} {data}", "a folder that is no bundle; needs a new folder."),
    ],
)
def test_bad_input_is_refused_by_name(
    command, words, llama_bundle, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    paths = {
        "tiny": DATA / "tiny-llama",
        "bundle": llama_bundle.root,
        "data": DATA,
        "some_text": DATA / "README.md",
        "weights": DATA / "tiny-llama" / "model.safetensors",
    }
    result = cli(*shlex.split(command.format_map(paths)))
    assert result.exit_code == 2 and result.stdout == ""
    assert words.format_map(paths) in result.stderr
    assert not list(tmp_path.iterdir())


RUNNING = (
    "generate {bundle} --prompt-ids 1",
    "evaluate {bundle} --prompt-ids 1,2",
    "explain {bundle} --checkpoint {tiny}",
    "explain parts {bundle} --checkpoint {tiny}",
    "explain variant {bundle} --checkpoint {tiny}",
    "explain ranges {bundle}",
    "explain op {bundle}",
    "golden {tiny} --out g --for {bundle}",
    "sweep {bundle} --log {log}",
    "sweep {grid} --log {log}",
)


@pytest.mark.parametrize("command", RUNNING)
def test_a_bundle_whose_options_do_not_fit_its_shards_is_refused_before_it_runs(
    command, llama_bundle, tmp_path, monkeypatch
):
    bundle = shutil.copytree(llama_bundle.root, tmp_path / "edited")
    manifest = bundle / "bundle.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"max_seq_len": 32', '"max_seq_len": 64'))
    grid = tmp_path / "grid.yaml"
    grid.write_text(f"bundle: [{bundle}]\nrun: {{T: [1]}}\n")
    monkeypatch.chdir(tmp_path)
    places = {"tiny": DATA / "tiny-llama", "log": tmp_path / "log"}
    words = command.format(bundle=bundle, grid=grid, **places)
    result = cli(*shlex.split(words))
    assert (result.exit_code, result.stdout) == (2, "")
    (*_, message) = result.stderr.splitlines()
    assert message == (
        f"workbench: {manifest}: found layers_00_00 attn_mask: [1, 1, 'T', 64] in the "
        "options, [1, 1, 'T', 32] in the list of shards; needs options that fit the "
        "shards. Next: restore the file, or make the bundle again with workbench export."
    )
    assert not (tmp_path / "g").exists()


@pytest.mark.parametrize("option", ["--sort foo", "--where 'foo == 1'"])
def test_an_unknown_column_does_not_print_all_columns(option):
    result = cli("log", *shlex.split(option))
    assert result.exit_code == 2 and "workbench log --json prints all" in result.stderr
    assert "thermal_pressure" not in result.stderr


OLD_SPELLINGS = {
    "validate BUNDLE --checkpoint TINY --each-unit": "validate units BUNDLE",
    "validate --each-unit BUNDLE": "validate units BUNDLE",
    "validate BUNDLE --golden g --alone": "--single-copy",
    "validate units BUNDLE --golden g --alone": "--single-copy",
    "explain BUNDLE --only parts": "explain parts|variant|ranges BUNDLE",
    "explain BUNDLE --only=ranges": "explain parts|variant|ranges BUNDLE",
    "explain BUNDLE --op --layer 0": "explain op BUNDLE",
    "log --pack out.zip": "log pack ZIP",
    "log --unpack out.zip --log folder": "log unpack ZIP",
    "log a b": "log compare RUN_A RUN_B",
    "log --log folder a b --json": "log compare RUN_A RUN_B",
}


@pytest.mark.parametrize("command", OLD_SPELLINGS)
def test_a_spelling_of_an_earlier_version_is_refused_with_the_present_one(
    command, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    result = cli(*shlex.split(command))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f" {OLD_SPELLINGS[command]}." in result.stderr
    assert not list(tmp_path.iterdir())


def test_every_old_option_has_a_case():
    cases = {tuple(case.replace("=", " ").split()) for case in OLD_SPELLINGS}
    for command, options in OLD_OPTIONS.items():
        for option in options:
            assert any(case[0] == command and option in case for case in cases), option


def test_a_word_is_the_subcommand_and_a_folder_of_its_name_has_its_path(
    llama_bundle, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for word in ("parts", "units"):
        Path(word).symlink_to(llama_bundle.root)
    missing = cli("explain", "parts")
    assert missing.exit_code == 2 and "BUNDLE" in missing.stderr
    document = invoke("explain", "./parts", "--checkpoint", DATA / "tiny-llama")
    assert document["parts"] and document["ranges"]
    assert invoke("validate", "./units")["gates"]


@pytest.mark.parametrize("value", ["abc", "1.5", "true"])
def test_a_parameter_of_another_type_is_refused_before_anything_runs(
    value, monkeypatch
):
    monkeypatch.setattr("workbench.experiment.run_notebook", pytest.fail)
    result = cli("run", "5", "--set", f"MAX_SEQ_LEN={value}")
    assert result.exit_code == 2 and result.stdout == ""
    assert f"MAX_SEQ_LEN: found {value}; needs a value like 256" in result.stderr


@pytest.mark.parametrize("assignment", ["CHECKPOINT", "CHECKPOINT=", "MAX_SEQ_LEN="])
def test_a_parameter_without_a_value_is_refused_before_anything_runs(
    assignment, monkeypatch
):
    monkeypatch.setattr("workbench.experiment.run_notebook", pytest.fail)
    monkeypatch.setattr("workbench.kernel.execute", pytest.fail)
    result = cli("run", "05", "--set", assignment)
    name = assignment.removesuffix("=")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"--set {name}: found no value; needs NAME=VALUE" in result.stderr
    assert f"Next: write --set {name}=VALUE" in result.stderr


def test_a_parameter_whose_default_is_an_empty_text_may_be_set_to_it():
    assert _notebook_settings(["05"], ["PROMPT="]) == {"05": {"PROMPT": ""}}


def test_ctrl_c_ends_a_command_with_130_and_without_a_traceback(monkeypatch, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("workbench.doctor.examine", stop)
    monkeypatch.setattr("sys.argv", ["workbench", "doctor"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and stderr.splitlines()[-1] == "workbench: interrupted"
    assert "Traceback" not in stderr


def test_a_wrong_name_of_an_export_option_in_a_grid_names_the_right_one(tmp_path):
    grid = tmp_path / "grid.yaml"
    grid.write_text(f"checkpoint: {DATA / 'tiny-llama'}\nexport: {{compres: [fp16]}}\n")
    result = cli("sweep", grid)
    assert result.exit_code == 2
    assert "export: compres; needs one of the export options" in result.stderr
    assert "did you mean compress?" in result.stderr
    missing = cli("sweep", tmp_path / "none.yaml")
    assert "found no such file; needs a YAML file" in missing.stderr


def test_a_misspelled_parameter_of_a_notebook_names_the_right_one(monkeypatch):
    monkeypatch.setattr("workbench.kernel.execute", pytest.fail)
    result = cli("run", "05", "--set", "MAX_SEQLEN=64")
    assert result.exit_code == 2 and "did you mean MAX_SEQ_LEN?" in result.stderr


def test_an_empty_text_is_refused_by_its_path(llama_bundle, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    result = cli("generate", llama_bundle.root, "--text", empty)
    assert result.exit_code == 2
    assert f"text {empty}: found no text; needs at least one token" in result.stderr


@pytest.mark.parametrize("name", ["05_stateful_kv_cache", "notebooks/05_x.ipynb"])
def test_a_notebook_that_is_named_by_its_file_has_a_number(name):
    result = cli("run", name)
    assert result.exit_code == 2
    assert "Next: name it by its number, 05." in result.stderr
