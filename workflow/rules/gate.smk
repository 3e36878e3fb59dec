"""gate: the minimum that a draft must reach.

REQUIRED INPUTS: results/NAME/evaluate/evaluate.json, results/NAME/report.html, so that a draft that fails has its page
OUTPUTS: results/NAME/gate.json
"""


rule gate:
    """Fail when the served acceptance length is below evaluate.min_acceptance_length."""
    input:
        evaluation=RESULTS / "evaluate/evaluate.json",
        page=RESULTS / "report.html",
    output:
        verdict=RESULTS / "gate.json",
    log:
        LOGS / "gate.log",
    conda:
        "../../envs/draftsmith.yaml"
    resources:
        mem_mb=4000,
        runtime=15,
    # The same file gives the same verdict.
    retries: 0
    localrule: True
    shell:
        "python -m draftsmith gate --evaluation {input.evaluation:q} --page {input.page:q} --verdict {output.verdict:q}"
        " 3>&2 > {log:q} 2>&1"
