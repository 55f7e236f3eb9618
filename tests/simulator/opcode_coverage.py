"""A pytest plugin that prints the opcodes of the simulator's tables which no test has run."""

from undertow.simulator import machine

RAN = set()


def pytest_configure(config):
    build = machine.compile_step

    def spy(instruction, owner, table):
        step = build(instruction, owner, table)
        RAN.add(instruction.opcode)
        return step

    machine.compile_step = spy


def pytest_terminal_summary(terminalreporter):
    missing = sorted(set(machine.TABLE) - RAN)
    terminalreporter.write_line(
        f"opcodes of the tables: {len(machine.TABLE)}, never run: {' '.join(missing) or 'none'}"
    )
