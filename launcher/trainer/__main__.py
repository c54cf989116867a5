"""`python -m launcher.trainer`, as torchrun starts each rank."""

from launcher.trainer.rank import main

main()
