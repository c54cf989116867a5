"""`python -m forerun._launcher.main_run.trainer`, as torchrun starts each rank."""

from forerun._launcher.main_run.process_signals import die_with_job

die_with_job()

from forerun._launcher.main_run.trainer.rank import main  # noqa: E402  (loading torch takes seconds: a killed agent must not leave us)

main()
