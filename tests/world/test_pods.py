"""Kubernetes' examples: what the page promises of them, and their pods' commands run here with the
variables that the cluster would set.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SCRIPT = """\
import os, sys, torch, weft
with weft.init() as world:
    total = weft.all_reduce(torch.ones(4))
    sys.stdout.write(f"rank {world.rank}: {total[0]:g} on {os.environ['OMP_NUM_THREADS']} threads\\n")
"""
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def documents(name):
    return [*yaml.safe_load_all((ROOT / "examples/kubernetes" / name).read_text())]


def job_set():
    """The job set, its pods' template, their container, and the container's variables but the one
    with the number of the pod.
    """
    [found] = documents("jobset.yaml")
    [job] = found["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    [container] = pods["template"]["spec"]["containers"]
    values = {each["name"]: each for each in container["env"]}
    assert values.pop("PET_NODE_RANK")["valueFrom"]["fieldRef"]["fieldPath"] == INDEX
    return found, pods, container, {name: each["value"] for name, each in values.items()}


def train_job():
    """The runtime, the job, the pods' template and their container."""
    runtime, job = documents("trainjob.yaml")
    [replicated] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    [container] = replicated["template"]["spec"]["template"]["spec"]["containers"]
    assert (replicated["name"], container["name"]) == ("node", "node"), "Trainer looks for these"
    labels = replicated["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    return runtime, job, replicated["template"]["spec"]["template"]["spec"], container


def assert_shared_memory(pod, container, resources):
    """/dev/shm is memory, a part of the limit of the container."""
    [mount] = [each for each in container["volumeMounts"] if each["mountPath"] == "/dev/shm"]
    [volume] = [each for each in pod["volumes"] if each["name"] == mount["name"]]
    assert volume["emptyDir"]["medium"] == "Memory"
    assert resources["requests"] == resources["limits"]

    def gib(text):
        return int(re.fullmatch(r"(\d+)Gi", text)[1])

    assert gib(volume["emptyDir"]["sizeLimit"]) < gib(resources["limits"]["memory"])


def test_the_job_set():
    found, pods, container, variables = job_set()
    name = found["metadata"]["name"]
    job = found["spec"]["replicatedJobs"][0]["name"]
    assert variables["PET_MASTER_ADDR"] == f"{name}-{job}-0-0.{name}"
    assert pods["parallelism"] == pods["completions"] == int(variables["PET_NNODES"])
    [port] = container["ports"]
    assert port["containerPort"] == int(variables["PET_MASTER_PORT"])
    assert_shared_memory(pods["template"]["spec"], container, container["resources"])
    threads = int(variables["PET_NPROC_PER_NODE"]) * int(variables["OMP_NUM_THREADS"])
    assert threads == int(container["resources"]["limits"]["cpu"])
    [affinity] = pods["template"]["spec"]["affinity"]["podAntiAffinity"].popitem()[1]
    assert affinity["labelSelector"]["matchLabels"] == {"jobset.sigs.k8s.io/jobset-name": name}


def test_the_train_job():
    runtime, job, pod, container = train_job()
    reference = job["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    trainer = job["spec"]["trainer"]
    assert trainer["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"]
    assert runtime["spec"]["mlPolicy"]["torch"] == {}
    [threads] = trainer["env"]  # Trainer refuses torchrun's own
    assert threads["name"] == "OMP_NUM_THREADS"
    cores = int(trainer["resourcesPerNode"]["limits"]["cpu"])
    assert trainer["numProcPerNode"] * int(threads["value"]) == cores
    assert_shared_memory(pod, container, trainer["resourcesPerNode"])
    [affinity] = pod["affinity"]["podAntiAffinity"].popitem()[1]
    name = {"jobset.sigs.k8s.io/jobset-name": job["metadata"]["name"]}
    assert affinity["labelSelector"]["matchLabels"] == name


def test_both_run_the_same():
    _, pods, container, variables = job_set()
    _, job, _, trained = train_job()
    trainer = job["spec"]["trainer"]
    assert container["image"] == trained["image"]
    assert container["command"] == trainer["command"] == ["torchrun", "/app/example.py"]
    assert container["resources"] == trainer["resourcesPerNode"]
    assert pods["parallelism"] == trainer["numNodes"]
    assert variables.pop("PET_MASTER_ADDR")
    # what Trainer's policy "torch" adds
    added = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_PORT": "29500",
    }
    assert variables == {each["name"]: each["value"] for each in trainer["env"]} | added


@pytest.mark.data
@pytest.mark.slow
def test_the_pods_make_one_world(tmp_path):
    (program := tmp_path / "example.py").write_text(SCRIPT)
    _, _, container, variables = job_set()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # here all pods are on one machine
    here = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    running = [
        subprocess.Popen(
            [BIN / container["command"][0], program],
            env=os.environ | variables | here | {"PET_NODE_RANK": str(pod)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for pod in range(int(variables["PET_NNODES"]))
    ]
    try:
        printed = [pod.communicate(timeout=90)[0] for pod in running]
    finally:
        for pod in running:
            pod.kill()
    for pod, text in enumerate(printed):
        for rank in (2 * pod, 2 * pod + 1):
            assert f"rank {rank}: 4 on 4 threads\n" in text, text
