"""`python -m launcher.trainer`, as torchrun starts each rank."""

from launcher.base.signals import die_with_job

die_with_job()

from launcher.trainer.rank import main  # noqa: E402  (loading torch takes seconds: a killed agent must not leave us)

main()
