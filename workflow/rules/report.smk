"""report: one page about the whole run.

REQUIRED INPUTS: the JSON files that the stages wrote
OUTPUTS: results/NAME/report.html
"""


rule report:
    """Data, losses, acceptance, speed, provenance and failures, in one self-contained page."""
    input:
        target=RESULTS / "target.json",
        tokenize=RESULTS / "tokenize/tokenize.json",
        preflight=RESULTS / "preflight.json",
        dry_run=RESULTS / "dry_run.json",
        manifest=RESULTS / "extract/manifest.json",
        shards=gather.extract(str(RESULTS / "extract/shards/{scatteritem}.json")),
        vocabulary=RESULTS / "vocabulary/vocabulary.json",
        look=RESULTS / "look/look.json",
        train=RESULTS / "train/train.json",
        export=RESULTS / "draft/export.json",
        evaluate=RESULTS / "evaluate/evaluate.json",
    output:
        page=report(
            RESULTS / "report.html",
            caption="../report/page.rst",
            category="Draft",
            labels={"what": "the whole run"},
        ),
    log:
        LOGS / "report.log",
    conda:
        "../../envs/draftsmith.yaml"
    params:
        settings=PLAN.settings("report"),
        results=RESULTS,
        benchmarks=BENCHMARKS,
    resources:
        mem_mb=4000,
        runtime=15,
    shell:
        "python -m draftsmith report --settings {params.settings:q}"
        " --results {params.results:q}"
        " --benchmarks {params.benchmarks:q} --page {output.page:q}"
        " 3>&2 > {log:q} 2>&1"
