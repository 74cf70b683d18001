"""The command line: `workbench COMMAND`."""


def main() -> None:
    """Runs the command that `sys.argv` names."""
    from workbench.cli.app import main

    main()
