"""train_draft: the draft learns the target's own predictions from the stored states.

REQUIRED INPUTS: results/NAME/{target.json,tokenize/rows.parquet,extract/manifest.json,vocabulary/vocabulary.safetensors}
OUTPUTS: results/NAME/train/draft.safetensors, results/NAME/train/train.json
Checkpoints lie in work/NAME/train, keyed by everything that changes them; the same command goes on from the newest.
"""


rule train_draft:
    """Train with the training-time test and keep the weights of the end."""
    input:
        target=RESULTS / "target.json",
        rows=RESULTS / "tokenize/rows.parquet",
        manifest=RESULTS / "extract/manifest.json",
        vocabulary=RESULTS / "vocabulary/vocabulary.safetensors",
        initial_draft=PLAN.initial_draft_files,
    output:
        draft=RESULTS / "train/draft.safetensors",
        report=RESULTS / "train/train.json",
    log:
        LOGS / "train_draft.log",
    benchmark:
        BENCHMARKS / "train_draft.tsv"
    conda:
        "../../envs/draftsmith.yaml"
    params:
        settings=PLAN.settings("train_draft"),
        workdir=WORK / "train",
    threads: 32
    resources:
        gpu=GPUS,
        nodes=1,
        # Each process builds the draft, the embedding and the head on the host before they go to its GPU.
        mem_mb=lambda wildcards, attempt: 200000 if GPUS > 1 else 64000,
        runtime=lambda wildcards, attempt: 1440 * attempt,
    shell:
        "python -m draftsmith train-draft --settings {params.settings:q} --gpus {resources.gpu} --nodes {resources.nodes}"
        " --target {input.target:q} --rows {input.rows:q}"
        " --manifest {input.manifest:q} --vocabulary {input.vocabulary:q} --workdir {params.workdir:q}"
        " --draft {output.draft:q} --report {output.report:q}"
        " 3>&2 > {log:q} 2>&1"
