"""merge_answers: the conversations with the answers of all shards. Part of the DAG only with `regenerate.enabled: true`.

REQUIRED INPUTS: results/NAME/target.json, the conversations that the config names, results/NAME/regenerate/shards/*.json
OUTPUTS: results/NAME/regenerate/{conversations.jsonl,regenerate.json}
"""


rule merge_answers:
    """Replace every assistant turn by what the target answered."""
    input:
        target=RESULTS / "target.json",
        sources=PLAN.sources,
        shards=branch(
            PLAN.served,
            # Servers have no shards.
            then=expand(RESULTS / "regenerate/shards/{scatteritem}.json", scatteritem="1-of-1"),
            otherwise=gather.regenerate(str(RESULTS / "regenerate/shards/{scatteritem}.json")),
        ),
    output:
        conversations=RESULTS / "regenerate/conversations.jsonl",
        report=RESULTS / "regenerate/regenerate.json",
    log:
        LOGS / "merge_answers.log",
    benchmark:
        BENCHMARKS / "merge_answers.tsv"
    conda:
        "../../envs/draftsmith.yaml"
    params:
        settings=PLAN.settings("merge_answers"),
        workdir=WORK / "regenerate",
    resources:
        mem_mb=16000,
        runtime=60,
    # Where answers are missing it removes files of shards, which the next run makes again; a retry could not.
    retries: 0
    shell:
        "python -m draftsmith merge-answers --settings {params.settings:q}"
        " --target {input.target:q} --workdir {params.workdir:q}"
        " --conversations {output.conversations:q} --report {output.report:q} {input.shards:q}"
        " 3>&2 > {log:q} 2>&1"
