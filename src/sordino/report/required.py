"""What a report must state, and which of it a run leaves out."""

from sordino.report.schema import Report

__all__ = ["missing"]


def missing(report: Report) -> tuple[str, ...]:
    """Names of the required things that the run does not state, in the order of the report.

    Audits, evaluation and the registry's texts are no part of this: a report without them is complete.
    """
    mechanism, process, answer = report.mechanism, report.process, report.accounting
    private = report.guarantee.is_private
    stated: dict[str, object] = {
        "when the run began": report.started,
        "what is released": report.released,
        "noise multiplier": mechanism.noise_multiplier,
        "clipping norm": mechanism.max_grad_norm,
        "sample rate": mechanism.sample_rate,
        "expected batch size": mechanism.expected_batch_size,
        "steps planned": mechanism.steps_planned,
        "whether the size of the data set is public": mechanism.dataset_size_is_public,
        "δ at every ε": report.curves.profile if private else "not private",
        "what an attacker can do": report.risk if private else "not private",
        "ε without amplification": answer.without_amplification,
        "ε at the level of users": report.user_level
        if private and report.guarantee.unit.value == "example"
        else "given",
        "class of the random generator": process.randomness,
        "arithmetic of the noise": process.arithmetic,
        "processes and resumes": process.segments,
        "composition with other uses of the records": report.composition.text or report.composition.spent,
        "versions of the software": report.environment,
        **{touch.title.lower(): touch.text for touch in report.touches},
    }
    return tuple(name for name, value in stated.items() if value is None or value == "" or value == ())
