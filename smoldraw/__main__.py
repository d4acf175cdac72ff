"""Train with `python -m smoldraw`. Worker processes do not import this module, so they start without diffusers."""

from smoldraw.train import main

if __name__ == "__main__":
    main()
