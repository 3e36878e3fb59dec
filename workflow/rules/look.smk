"""look: the data on a page, before anything is extracted. `snakemake --profile local look` makes it and no more.

REQUIRED INPUTS: results/NAME/{target.json,tokenize/{rows.parquet,prompts.jsonl,tokenize.json},vocabulary/vocabulary.json}
OUTPUTS: results/NAME/look/{page.html,look.json}
"""


rule look:
    """Draw a sample of rows with their masks, and the domains and languages of training and evaluation."""
    input:
        target=RESULTS / "target.json",
        rows=RESULTS / "tokenize/rows.parquet",
        prompts=RESULTS / "tokenize/prompts.jsonl",
        tokenize=RESULTS / "tokenize/tokenize.json",
        vocabulary=RESULTS / "vocabulary/vocabulary.json",
    output:
        page=report(
            RESULTS / "look/page.html",
            caption="../report/look.rst",
            category="Data",
            labels={"what": "rows, masks, mixes"},
        ),
        report=RESULTS / "look/look.json",
    log:
        LOGS / "look.log",
    benchmark:
        BENCHMARKS / "look.tsv"
    conda:
        "../../envs/draftsmith.yaml"
    params:
        settings=PLAN.settings("look"),
    resources:
        mem_mb=8000,
        runtime=30,
    # It is of use before the hours that follow, so it goes first.
    priority: 10
    shell:
        "python -m draftsmith look --settings {params.settings:q}"
        " --target {input.target:q} --rows {input.rows:q} --prompts {input.prompts:q}"
        " --tokenize-report {input.tokenize:q} --vocabulary-report {input.vocabulary:q}"
        " --page {output.page:q} --report {output.report:q}"
        " 3>&2 > {log:q} 2>&1"
