"""Parts of the doctor's findings, each written once for all tests that expect it."""

ITSELF = "node 0's address is this machine itself"
NO_LOOPBACK = "a connection to itself (127.0.0.1) gets no answer; no measurement on this machine"
LARGE_LOST = "connections work, but full-size packets are lost"
TOO_FAR = "expected below 1 ms in one data center"
CPU_LIMIT = "the control group limits CPU time to"
NO_REPLY = "ddplaunch cannot read the reply of this host"
NO_GPU_ANSWER = "the driver cannot reach it"
