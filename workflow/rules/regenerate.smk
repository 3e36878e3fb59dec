"""regenerate: answers in the target's own words. Part of the DAG only with `regenerate.enabled: true`.

With `regenerate.endpoint` it asks a server, needs no GPU, and runs where Snakemake does: another node of a cluster may not
reach that address.

REQUIRED INPUTS: results/NAME/target.json and the conversations that the config names
OUTPUTS: results/NAME/regenerate/conversations.jsonl, results/NAME/regenerate/regenerate.json
"""


rule regenerate:
    """Replace every assistant turn by what the target answers; what is answered already is not asked again."""
    input:
        target=RESULTS / "target.json",
        sources=PLAN.sources,
    output:
        conversations=RESULTS / "regenerate/conversations.jsonl",
        report=RESULTS / "regenerate/regenerate.json",
    log:
        LOGS / "regenerate.log",
    benchmark:
        BENCHMARKS / "regenerate.tsv"
    conda:
        "../../envs/draftsmith.yaml"
    params:
        settings=PLAN.settings("regenerate"),
        # Where the server is changes no answer; whether there is one may, as its precision is its own.
        by="server" if PLAN.served else "engine",
        workdir=WORK / "regenerate",
    threads: 2 if PLAN.served else 16
    resources:
        gpu=0 if PLAN.served else GPUS,
        mem_mb=8000 if PLAN.served else 64000,
        runtime=lambda wildcards, attempt: 720 * attempt,
    localrule: PLAN.served
    shell:
        "python -m draftsmith regenerate --settings {params.settings:q}"
        " --gpus {resources.gpu}"
        " --target {input.target:q} --workdir {params.workdir:q}"
        " --conversations {output.conversations:q} --report {output.report:q}"
        " 3>&2 > {log:q} 2>&1"
