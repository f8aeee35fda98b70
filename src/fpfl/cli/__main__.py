"""``python -m fpfl.cli``: for torchrun, and where no ``fpfl`` is on the path."""

from fpfl.cli.app import main

main()
