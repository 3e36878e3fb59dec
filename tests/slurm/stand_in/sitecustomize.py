"""Puts stand-ins in the place of vLLM and of NVIDIA's library; Python imports this file by its name, where it is on the path."""

import soon  # noqa: F401

# After `soon`, which lets this process find them.
import fake_nvml
from after_import import after_import

fake_nvml.install(fake_nvml.Nvml(fake_nvml.h200s(8)))


def change(driver):
    from stand_in_engine import StandIn

    driver.Session = StandIn


after_import("draftsmith.extract_shard.driver", change)
