"""regenerate: answers in the target's own words. Part of the DAG only with `regenerate.enabled: true`.

A shard is one load of the target. With `regenerate.endpoint` there is one shard, which asks all servers, needs no GPU, and
runs where Snakemake does: another node of a cluster may not reach those addresses.

REQUIRED INPUTS: results/NAME/target.json and the conversations that the config names
OUTPUTS: results/NAME/regenerate/shards/{scatteritem}.json
The answers are no outputs: they lie in work/NAME/regenerate, where the end of a job leaves them.
"""


rule regenerate:
    """Let the target answer the questions of one shard; what is answered already is not asked again."""
    input:
        target=RESULTS / "target.json",
        sources=PLAN.sources,
    output:
        report=RESULTS / "regenerate/shards/{scatteritem}.json",
    log:
        LOGS / "regenerate/{scatteritem}.log",
    benchmark:
        BENCHMARKS / "regenerate/{scatteritem}.tsv"
    conda:
        "../../envs/draftsmith.yaml"
    params:
        settings=PLAN.settings("regenerate"),
        # Where the server is changes no answer; whether there is one may, as its precision is its own.
        by="server" if PLAN.served else "engine",
        workdir=WORK / "regenerate",
    threads: 2 if PLAN.served else ENGINE_THREADS
    resources:
        gpu=0 if PLAN.served else GPUS,
        mem_mb=8000 if PLAN.served else 64000,
        runtime=lambda wildcards, attempt: 720 * attempt,
    localrule: PLAN.served
    shell:
        "python -m draftsmith regenerate --settings {params.settings:q}"
        " --gpus {resources.gpu}"
        " --target {input.target:q} --workdir {params.workdir:q} --scatteritem {wildcards.scatteritem}"
        " --report {output.report:q}"
        " 3>&2 > {log:q} 2>&1"
