"""export_draft: the folder that a server loads.

REQUIRED INPUTS: results/NAME/{target.json,train/draft.safetensors,train/train.json,vocabulary/vocabulary.safetensors}
OUTPUTS: results/NAME/draft/{config.json,model.safetensors,README.md}, results/NAME/draft/export.json; beside them a folder for each of export.layouts
"""


rule export_draft:
    """Write config.json, weights and model card, and check them tensor by tensor."""
    input:
        target=RESULTS / "target.json",
        draft=RESULTS / "train/draft.safetensors",
        train=RESULTS / "train/train.json",
        vocabulary=RESULTS / "vocabulary/vocabulary.safetensors",
        initial_draft=PLAN.initial_draft_files,
    output:
        config=RESULTS / "draft/config.json",
        weights=RESULTS / "draft/model.safetensors",
        card=RESULTS / "draft/README.md",
        report=RESULTS / "draft/export.json",
    log:
        LOGS / "export_draft.log",
    benchmark:
        BENCHMARKS / "export_draft.tsv"
    conda:
        "../../envs/draftsmith.yaml"
    params:
        settings=PLAN.settings("export_draft"),
        folder=RESULTS / "draft",
    resources:
        mem_mb=16000,
        runtime=30,
    shell:
        "python -m draftsmith export-draft --settings {params.settings:q}"
        " --target {input.target:q} --draft {input.draft:q}"
        " --vocabulary {input.vocabulary:q} --train-report {input.train:q}"
        " --folder {params.folder:q} --report {output.report:q}"
        " 3>&2 > {log:q} 2>&1"
