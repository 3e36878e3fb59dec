"""NVML of a node with eight GPUs on which nothing runs, for nodes that only claim to have any."""

GPUS, TOTAL = 8, 141 << 30


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_NoPermission(NVMLError):
    pass


class _Memory:
    total, used, free = TOTAL, 0, TOTAL


def nvmlInit():
    pass


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return GPUS


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetUUID(handle):
    return f"GPU-{handle}"


def nvmlDeviceGetName(handle):
    return "NVIDIA H200"


def nvmlDeviceGetMemoryInfo(handle):
    return _Memory


def nvmlDeviceGetMigMode(handle):
    return [0, 0]


def nvmlDeviceGetComputeRunningProcesses(handle):
    return []


nvmlDeviceGetGraphicsRunningProcesses = nvmlDeviceGetComputeRunningProcesses
