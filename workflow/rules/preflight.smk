"""preflight: what would fail after an 18-minute load, and can be told without weights, fails here in seconds.

REQUIRED INPUTS: results/NAME/target.json, results/NAME/tokenize/{rows.parquet,tokenize.json}
OUTPUTS: results/NAME/preflight.json
"""


rule preflight:
    """Check the target, the rows, the engine and the machine against one another before any model is loaded."""
    input:
        target=RESULTS / "target.json",
        rows=RESULTS / "tokenize/rows.parquet",
        tokenize=RESULTS / "tokenize/tokenize.json",
    output:
        report=RESULTS / "preflight.json",
    log:
        LOGS / "preflight.log",
    benchmark:
        BENCHMARKS / "preflight.tsv"
    conda:
        "../../envs/draftsmith.yaml"
    params:
        settings=PLAN.settings("preflight"),
    threads: 2
    resources:
        gpu=GPUS,
        mem_mb=16000,
        runtime=lambda wildcards, attempt: 15 * attempt,
    shell:
        "python -m draftsmith preflight --settings {params.settings:q}"
        " --gpus {resources.gpu}"
        " --target {input.target:q} --rows {input.rows:q} --tokenize-report {input.tokenize:q}"
        " --report {output.report:q}"
        " 3>&2 > {log:q} 2>&1"
