"""evaluate_draft: the draft at work, in vLLM, on prompts that it never saw.

REQUIRED INPUTS: results/NAME/draft/*, results/NAME/{target.json,tokenize/prompts.jsonl,vocabulary/vocabulary.safetensors}
OUTPUTS: results/NAME/evaluate/evaluate.json
"""


rule evaluate_draft:
    """Serve the target with and without the draft; count what it accepts, and compare the answers."""
    input:
        target=RESULTS / "target.json",
        config=RESULTS / "draft/config.json",
        weights=RESULTS / "draft/model.safetensors",
        prompts=RESULTS / "tokenize/prompts.jsonl",
        vocabulary=RESULTS / "vocabulary/vocabulary.safetensors",
    output:
        report=RESULTS / "evaluate/evaluate.json",
    log:
        LOGS / "evaluate_draft.log",
    benchmark:
        BENCHMARKS / "evaluate_draft.tsv"
    conda:
        "../../envs/draftsmith.yaml"
    params:
        settings=PLAN.settings("evaluate_draft"),
        draft=RESULTS / "draft",
        workdir=WORK / "evaluate",
    threads: 16
    resources:
        gpu=GPUS,
        mem_mb=64000,
        runtime=lambda wildcards, attempt: 240 * attempt,
    shell:
        "python -m draftsmith evaluate-draft --settings {params.settings:q}"
        " --gpus {resources.gpu}"
        " --target {input.target:q} --draft {params.draft:q} --vocabulary {input.vocabulary:q}"
        " --prompts {input.prompts:q} --workdir {params.workdir:q} --report {output.report:q}"
        " 3>&2 > {log:q} 2>&1"
