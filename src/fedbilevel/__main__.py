"""`python -m fedbilevel` is the command `fedbilevel`."""

from .cli import main

if __name__ == "__main__":  # a site imports modules whose steps it is asked for; this one must do nothing then
    main()
