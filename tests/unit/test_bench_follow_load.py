"""What `python -m bench.follow_load` prints of simulated servers and of made days."""

from click.testing import CliRunner

from bench.follow_load import main


def test_following_the_load_has_lower_peaks_on_a_made_day_and_moves_queues() -> None:
    done = CliRunner().invoke(main, ["--servers", "3", "--days", "1"])
    assert done.exit_code == 0, done.output
    _, servers, p99, minutes = (line.split(" | ") for line in done.output.splitlines())
    assert servers[0].startswith("3 servers: ")
    for _, static, following, moves in (p99, minutes):
        assert float(following) < float(static)
        assert int(moves) > 0
