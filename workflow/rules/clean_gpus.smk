"""clean_gpus: nothing of an earlier run may hold the granted GPUs.

REQUIRED INPUTS: results/NAME/preflight.json, so that it runs late
OUTPUTS: results/NAME/clean_gpus.json
The same check is made at the start of every GPU job: on a cluster this rule may have looked at another node.
"""


rule clean_gpus:
    """Name the processes on the granted GPUs; end orphans of this workflow only where the config allows it."""
    input:
        preflight=RESULTS / "preflight.json",
    output:
        report=RESULTS / "clean_gpus.json",
    log:
        LOGS / "clean_gpus.log",
    benchmark:
        BENCHMARKS / "clean_gpus.tsv"
    conda:
        "../../envs/draftsmith.yaml"
    resources:
        gpu=GPUS,
        mem_mb=4000,
        runtime=10,
    shell:
        "python -m draftsmith clean-gpus --gpus {resources.gpu} --report {output.report:q} 3>&2 > {log:q} 2>&1"
