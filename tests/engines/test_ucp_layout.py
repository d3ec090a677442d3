"""What weft declares of UCX's interface has the layout of UCX's headers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from support.ucx import folders

ROOT = Path(__file__).parents[2]
FIELDS = {
    ("Params", "ucp_params_t"): {
        "mask": "field_mask",
        "features": "features",
        "request_size": "request_size",
        "estimated_endpoints": "estimated_num_eps",
    },
    ("WorkerParams", "ucp_worker_params_t"): {
        "mask": "field_mask",
        "thread_mode": "thread_mode",
        "cpus": "cpu_mask",
        "events": "events",
        "flags": "flags",
    },
    ("WorkerAttributes", "ucp_worker_attr_t"): {
        "mask": "field_mask",
        "thread_mode": "thread_mode",
        "address_flags": "address_flags",
        "address": "address",
        "address_length": "address_length",
    },
    ("EndpointParams", "ucp_ep_params_t"): {
        "mask": "field_mask",
        "address": "address",
        "error_mode": "err_mode",
        "error_handler.call": "err_handler.cb",
        "error_handler.argument": "err_handler.arg",
    },
    ("RequestParams", "ucp_request_param_t"): {
        "mask": "op_attr_mask",
        "flags": "flags",
        "request": "request",
        "callback": "cb",
        "datatype": "datatype",
        "user_data": "user_data",
        "reply_buffer": "reply_buffer",
        "memory_type": "memory_type",
        "received_length": "recv_info",
        "memory": "memh",
    },
    ("ReceiveParams", "ucp_am_recv_param_t"): {"attributes": "recv_attr", "reply": "reply_ep"},
    ("HandlerParams", "ucp_am_handler_param_t"): {
        "mask": "field_mask",
        "id": "id",
        "flags": "flags",
        "callback": "cb",
        "argument": "arg",
    },
}
VALUES = {
    "kOk": "UCS_OK",
    "kInProgress": "UCS_INPROGRESS",
    "kLast": "UCS_ERR_LAST",
    "Params::kFeatures": "UCP_PARAM_FIELD_FEATURES",
    "Params::kEstimatedEndpoints": "UCP_PARAM_FIELD_ESTIMATED_NUM_EPS",
    "Params::kWakeup": "UCP_FEATURE_WAKEUP",
    "Params::kMessages": "UCP_FEATURE_AM",
    "WorkerParams::kThreadMode": "UCP_WORKER_PARAM_FIELD_THREAD_MODE",
    "WorkerParams::kFlags": "UCP_WORKER_PARAM_FIELD_FLAGS",
    "WorkerParams::kSerialized": "UCS_THREAD_MODE_SERIALIZED",
    "WorkerParams::kIgnoreRequestLeak": "UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK",
    "WorkerAttributes::kAddress": "UCP_WORKER_ATTR_FIELD_ADDRESS",
    "WorkerAttributes::kAddressFlags": "UCP_WORKER_ATTR_FIELD_ADDRESS_FLAGS",
    "WorkerAttributes::kNetworkOnly": "UCP_WORKER_ADDRESS_FLAG_NET_ONLY",
    "EndpointParams::kAddress": "UCP_EP_PARAM_FIELD_REMOTE_ADDRESS",
    "EndpointParams::kErrorMode": "UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE",
    "EndpointParams::kErrorHandler": "UCP_EP_PARAM_FIELD_ERR_HANDLER",
    "EndpointParams::kPeerErrors": "UCP_ERR_HANDLING_MODE_PEER",
    "RequestParams::kCallback": "UCP_OP_ATTR_FIELD_CALLBACK",
    "RequestParams::kUserData": "UCP_OP_ATTR_FIELD_USER_DATA",
    "RequestParams::kFlags": "UCP_OP_ATTR_FIELD_FLAGS",
    "RequestParams::kCloseByForce": "UCP_EP_CLOSE_FLAG_FORCE",
    "ReceiveParams::kData": "UCP_AM_RECV_ATTR_FLAG_DATA",
    "ReceiveParams::kRendezvous": "UCP_AM_RECV_ATTR_FLAG_RNDV",
    "HandlerParams::kId": "UCP_AM_HANDLER_PARAM_FIELD_ID",
    "HandlerParams::kFlags": "UCP_AM_HANDLER_PARAM_FIELD_FLAGS",
    "HandlerParams::kCallback": "UCP_AM_HANDLER_PARAM_FIELD_CB",
    "HandlerParams::kArgument": "UCP_AM_HANDLER_PARAM_FIELD_ARG",
    "HandlerParams::kWholeMessage": "UCP_AM_FLAG_WHOLE_MSG",
    "HandlerParams::kPersistentData": "UCP_AM_FLAG_PERSISTENT_DATA",
}


def headers() -> list[Path]:
    """The folders with UCX's headers: those of a system, as of libucx-dev, and of a package."""
    found = [Path("/usr/include"), *(each / "include" for each in folders())]
    return [folder for folder in found if (folder / "ucp/api/ucp.h").exists()]


def program(changed=()):
    """A program that compiles if the layouts are equal."""
    asserted = ["sizeof(weft::ucp::Status) == sizeof(ucs_status_t)"]
    for (own, theirs), fields in FIELDS.items():
        # UCX reads only the fields that are set, and later versions add others
        asserted.append(f"sizeof(weft::ucp::{own}) <= sizeof({theirs})")
        for mine, field in fields.items():
            asserted.append(f"offsetof(weft::ucp::{own}, {mine}) == offsetof({theirs}, {field})")
            member = f"std::declval<weft::ucp::{own}>().{mine}"
            asserted.append(f"sizeof({member}) == sizeof(std::declval<{theirs}>().{field})")
    values = VALUES | dict(changed)
    asserted += [
        f"uint64_t(weft::ucp::{mine}) == uint64_t({value})" for mine, value in values.items()
    ]
    lines = [f'static_assert({each}, "");' for each in asserted]
    return "\n".join(
        ["#include <utility>", "#include <ucp/api/ucp.h>", '#include "hosts/ucp.hpp"', *lines, ""]
    )


def compiled(source, folder):
    compiler = shutil.which("c++")
    words = [compiler, "-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof", "-x", "c++", "-"]
    words += ["-I", str(folder), "-I", str(ROOT / "native")]
    return subprocess.run(words, input=source, capture_output=True, text=True)


@pytest.mark.skipif(not (headers() and shutil.which("c++")), reason="no headers of UCX, or no c++")
def test_declarations_have_the_layout_of_the_headers():
    for folder in headers():
        done = compiled(program(), folder)
        assert done.returncode == 0, done.stderr
        wrong = {"RequestParams::kCallback": "UCP_OP_ATTR_FIELD_USER_DATA"}
        assert "static assertion failed" in compiled(program(wrong.items()), folder).stderr
