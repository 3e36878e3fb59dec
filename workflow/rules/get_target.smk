"""get_target: the model on this machine.

REQUIRED INPUTS: none but the files of a target that is a folder (config: target)
OUTPUTS: results/NAME/target.json, which says where the model lies and what it is
"""


rule get_target:
    """Find or fetch the target and write down its sizes, layer ids and fingerprint."""
    input:
        PLAN.target_files,
    output:
        target=RESULTS / "target.json",
    log:
        LOGS / "get_target.log",
    benchmark:
        BENCHMARKS / "get_target.tsv"
    conda:
        "../../envs/draftsmith.yaml"
    params:
        settings=PLAN.settings("get_target"),
        cache="resources/targets",
    resources:
        mem_mb=8000,
        runtime=lambda wildcards, attempt: 240 * attempt,
    shell:
        "python -m draftsmith get-target --settings {params.settings:q}"
        " --cache {params.cache:q} --target {output.target:q}"
        " 3>&2 > {log:q} 2>&1"
