"""The command line: `workbench COMMAND`.

app.py gives every command its function and parses the arguments; ending.py turns what a
command raises into one message and an exit code. The commands are in

    bundles.py      export, golden, adopt, doctor
    checks.py       validate and its subcommand, with validation_record.py
    explaining.py   explain and its subcommands
    inference.py    the commands that run a bundle
    planning.py     plan
    experiments.py  run, report, sweep
    logs.py         log and its subcommands

options.py has the groups of options that they share, mixed.py those of `export --compress
mixed`; output.py prints a result as text or JSON. spellings.py refuses the words of earlier
versions, arguments.py words the errors of cyclopts."""


def main() -> None:
    """Runs the command that `sys.argv` names, and ends with its exit code."""
    import atexit
    import gc

    from workbench.cli import ending

    # Python looks for garbage among the objects of torch and pandas as it exits, most of
    # the seconds between the last output and the end. The system frees them anyway.
    atexit.register(gc.freeze)

    def command() -> None:
        from workbench.cli.app import run

        run()

    ending.end(command)
