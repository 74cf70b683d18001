"""The command line: `workbench COMMAND`."""


def main() -> None:
    """Runs the command that `sys.argv` names, and ends with its exit code."""
    from workbench.cli import ending

    def command() -> None:
        from workbench.cli.app import run

        run()

    ending.end(command)
