"""`python -m fedbilevel` is the command `fedbilevel`."""

from .cli import main

main()
