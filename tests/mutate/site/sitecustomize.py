"""Python runs this file at its start: in a recording, every process imports the package with probes."""

from tests.mutate import probes

probes.install()
