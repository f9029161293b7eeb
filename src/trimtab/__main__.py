"""`python -m trimtab` is the `trimtab` command."""

from trimtab.cli.main import main

main()
