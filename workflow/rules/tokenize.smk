"""tokenize: token rows with supervised spans, and the prompts kept for evaluation.

REQUIRED INPUTS: results/NAME/target.json and the conversations (the config's, or regenerated ones)
OUTPUTS: results/NAME/tokenize/{rows.parquet,prompts.jsonl,tokenize.json}
"""


rule tokenize:
    """Render the conversations by the target's chat template, mark the answers, split off validation and evaluation."""
    input:
        target=RESULTS / "target.json",
        sources=branch(
            PLAN.config.regenerate.enabled,
            then=RESULTS / "regenerate/conversations.jsonl",
            otherwise=PLAN.sources,
        ),
    output:
        rows=RESULTS / "tokenize/rows.parquet",
        prompts=RESULTS / "tokenize/prompts.jsonl",
        report=RESULTS / "tokenize/tokenize.json",
    log:
        LOGS / "tokenize.log",
    benchmark:
        BENCHMARKS / "tokenize.tsv"
    conda:
        "../../envs/draftsmith.yaml"
    params:
        settings=PLAN.settings("tokenize"),
        workdir=WORK / "tokenize",
        conversations=branch(
            PLAN.config.regenerate.enabled,
            then=f"--conversations {RESULTS / 'regenerate/conversations.jsonl'}",
            otherwise="",
        ),
    threads: 8
    resources:
        mem_mb=8000,
        runtime=lambda wildcards, attempt: 120 * attempt,
    shell:
        "python -m draftsmith tokenize --settings {params.settings:q}"
        " --target {input.target:q} --workdir {params.workdir:q} {params.conversations}"
        " --rows {output.rows:q} --prompts {output.prompts:q} --report {output.report:q}"
        " 3>&2 > {log:q} 2>&1"
