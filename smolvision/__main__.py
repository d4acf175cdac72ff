"""`python -m smolvision` trains (train.py). Worker processes do not import this module again, and so start without transformers."""

from smolvision.train import main

if __name__ == "__main__":
    main()
