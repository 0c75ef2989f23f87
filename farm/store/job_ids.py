"""Find a stored job by its id or by the beginning of its id, as users write it."""

from __future__ import annotations

from sqlmodel import Session, col, select

from farm.errors import NoSuchJob, did_you_mean
from farm.store.tables import Job, ModelVariant


def find_job(session: Session, job_or_prefix: str) -> Job:
    """Return the job with this id, or the only job whose id has this prefix. Raises `NoSuchJob` if
    no job or several jobs match, or the id is empty (for example an unset shell variable)."""
    if not job_or_prefix.strip():
        raise NoSuchJob(
            "The id of a job is empty.",
            "Give the job's id or its first characters; `farm jobs` lists the ids.",
        )
    jobs = session.exec(
        select(Job).where(col(Job.id).startswith(job_or_prefix, autoescape=True))
    ).all()
    exact = [job for job in jobs if job.id == job_or_prefix]
    if exact or len(jobs) == 1:
        return (exact or jobs)[0]
    if jobs:
        raise NoSuchJob(
            f"The ids of several jobs begin with '{job_or_prefix}'.",
            "Give more characters; `farm jobs` lists the ids.",
        )
    text = f"There is no job '{job_or_prefix}'."
    if job_or_prefix.endswith((".csv", ".json")):
        step = "--csv and --json print on stdout and take no file. Write > before the file."
        raise NoSuchJob(text, step)
    models = select(ModelVariant.model).where(ModelVariant.model == job_or_prefix)
    if session.exec(models).first() is not None:
        raise NoSuchJob(text, f"It is a model. List its jobs with `farm jobs {job_or_prefix}`.")
    near = did_you_mean(job_or_prefix, session.exec(select(Job.id)))
    raise NoSuchJob(text, near or "List the jobs with `farm jobs`.")
