"""`python -m fedbilevel` is the command `fedbilevel`."""

from .cli import main

if __name__ == "__main__":  # A site imports the modules of the steps that it runs; that must not start a command.
    main()
