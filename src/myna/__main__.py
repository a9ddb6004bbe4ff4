"""`python -m myna` is `myna`: torchrun and accelerate start it so."""

from myna.commands import main

if __name__ == "__main__":
    main()
