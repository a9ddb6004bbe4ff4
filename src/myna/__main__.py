"""`python -m myna` is `myna`: what torchrun and accelerate start."""

from myna.cli import main

if __name__ == "__main__":
    main()
