"""`python3 -m unittest discover -s scripts/evidence`."""

import tempfile
import unittest
from pathlib import Path
from unittest import mock

import page
import read
import rows
from paired import t_test, two_sided
from rows import Column, Row
from run import Runner, placed

ROW = Row(
    id="small", paper="", claim="", published="", minutes=1, seeds=(0, 1, 2), keys=("data", "mechanism"), control="softmax",
    commands=("cargo run --release --example tables -- two --seed $seed",), read={"kind": "table"},
    columns=(Column("accuracy", "accuracy, %", scale=100, digits=1, test=True), Column("|E|", "\\|E\\|", log=True)),
)  # fmt: skip
PRINTED = """
| data | other |
|---|---|
| near | 3 |

| data | mechanism | accuracy | \\|E\\| |
|---|---|---|---|
| near | softmax | 0.5 | 1e-3 |
| near | infsa | {} | none |
"""


class Numbers(unittest.TestCase):
    def test_students_t_at_tabulated_values(self):
        for freedom, t in [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (5, 2.57058), (19, 2.09302)]:
            self.assertAlmostEqual(two_sided(t, freedom), 0.05, 5)
            self.assertAlmostEqual(two_sided(-t, freedom), 0.05, 5)
        self.assertAlmostEqual(two_sided(1, 1), 0.5)

    def test_a_test_needs_differences_that_differ(self):
        self.assertIsNone(t_test([0.3]))
        self.assertIsNone(t_test([0.3, 0.3]))
        self.assertAlmostEqual(t_test([1, 2, 3]), two_sided(12**0.5, 2))


class Reading(unittest.TestCase):
    def test_the_table_with_all_columns_is_read(self):
        found = read.figures(ROW, 0, Path(), PRINTED.format(0.6))
        self.assertEqual(found["near | softmax"], {"accuracy": 0.5, "|E|": 1e-3})
        self.assertEqual(found["near | infsa"], {"accuracy": 0.6, "|E|": None})
        with self.assertRaises(ValueError):
            read.figures(ROW, 0, Path(), "| data | other |\n|---|---|\n| near | 3 |\n")

    def test_a_deviation_in_a_cell_is_of_the_draws_of_one_command(self):
        found = read.figures(ROW, 0, Path(), PRINTED.format("0.6 ± 0.02"))["near | infsa"]
        self.assertEqual((found["accuracy"], found["accuracy ±"]), (0.6, 0.02))
        self.assertEqual(page.summary(ROW.columns[0], [60.0], [2.0]), "60.0 ± 2.0")
        self.assertEqual(read.numbers("cosine", "0.9 (0.8)"), [("cosine", 0.9)])
        self.assertEqual([read.number(cell) for cell in ["1.8x", "12.5 %", "max"]], [1.8, 12.5, None])

    def test_paths_lead_through_lists(self):
        of = {"heads": [{"name": "a", "gap": 1}, {"name": "b", "gap": 5}, {"name": "a", "gap": 2}, {"name": "a", "gap": None}]}
        self.assertEqual(read.at(of, "heads.1.gap"), 5)
        self.assertEqual(read.at(of, "heads.name=a.gap"), 1)
        self.assertEqual(read.at(of, "heads.*name=a.gap"), 1.5)
        self.assertIsNone(read.at({"heads": [{"name": "a", "gap": None}]}, "heads.*name=a.gap"))
        with self.assertRaises(LookupError):
            read.at(of, "heads.name=c.gap")


class Page(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        patch = mock.patch.object(rows, "RESULTS", Path(folder.name))
        patch.start()
        self.addCleanup(patch.stop)

    def measure(self, seeds):
        for seed, accuracy in seeds.items():
            found = read.figures(ROW, seed, Path(), PRINTED.format(accuracy))
            with mock.patch.object(Runner, "digest", lambda *_: ""):
                Runner(Path(), Path(), 1, "commit").keep(ROW, seed, 1.0, found)

    def test_a_table_has_means_deviations_and_tests(self):
        self.measure({0: 0.6, 1: 0.61, 2: 0.65})
        text = page.block(ROW)
        self.assertIn("    for seed in 0 1 2; do\n        cargo run", text)
        self.assertIn("| near | softmax | 50.0 ± 0.0 | 1.0e-3 |  |", text)
        # Differences of 10, 11 and 15: a mean of 12, a standard error of 1.53, t = 7.86.
        self.assertIn("|  | infsa | 62.0 ± 2.6 |  | +12.0, 0.016 |", text)

    def test_a_figure_may_be_tested_against_another_of_its_arm(self):
        columns = (Column("accuracy", "accuracy", log=True, against="|E|"), Column("|E|", "error", log=True))
        row = Row(**{**ROW.__dict__, "columns": columns, "control": ""})
        for seed, (accuracy, error) in enumerate([(0.5, 0.1), (0.6, 0.1), (0.8, 0.2)]):
            found = {"near | softmax": {"accuracy": accuracy, "|E|": error}}
            with mock.patch.object(Runner, "digest", lambda *_: ""):
                Runner(Path(), Path(), 1, "commit").keep(row, seed, 1.0, found)
        text = page.block(row)
        self.assertIn("| accuracy: difference to error, p |", text)
        # Factors of 5, 6 and 4: a geometric mean of 4.93.
        self.assertIn("| ×4.93, 0.005 |", text)
        self.assertIn("Three seeds.", text)

    def test_arms_may_be_tested_against_a_second_control(self):
        found = [{"a | x": 1.0, "a | y": 2.0, "b | x": 1.0, "b | y": 4.0, "b | z": 3.0}, {"a | x": 1.5, "a | y": 2.5, "b | x": 1.0, "b | y": 4.5, "b | z": 3.0}]
        row = Row(**{**ROW.__dict__, "columns": (Column("f", "F", test=True),), "control": "y", "also_against": {"keys": ["mechanism", "data"], "control": "a"}})
        for seed, of_seed in enumerate(found):
            with mock.patch.object(Runner, "digest", lambda *_: ""):
                Runner(Path(), Path(), 1, "commit").keep(row, seed, 1.0, {arm: {"f": value} for arm, value in of_seed.items()})
        again = page.block(row).partition("Against a:\n\n")[2]
        lines = ["| mechanism | data | F: difference, p |", "|---|---|---|", "| x | b | -0.25, 0.50 |", "| y | b | +2.00, - |"]
        self.assertEqual(again.splitlines(), lines)

    def test_what_is_hidden_is_measured_and_not_shown(self):
        self.measure({0: 0.6, 1: 0.61})
        text = page.block(Row(**{**ROW.__dict__, "hidden": {"mechanism": ["softmax"]}}))
        self.assertNotIn("| softmax |", text)
        self.assertIn("| near | infsa | 60.5 ± 0.7 |  | +10.5, 0.030 |", text)

    def test_one_seed_is_called_so_and_not_tested(self):
        self.measure({0: 0.6})
        text = page.block(ROW)
        self.assertIn("One of 3 seeds.", text)
        self.assertNotIn("±", text)
        self.assertNotIn("difference", text)

    def test_results_of_other_commands_do_not_count(self):
        self.measure({0: 0.6, 1: 0.61})
        other = Row(**{**ROW.__dict__, "commands": ("cargo run --release --example tables -- one",)})
        self.assertEqual((len(ROW.results()), len(other.results())), (2, 0))

    def test_places_and_rows_belong_together(self):
        text = "before\n<!-- evidence: small -->\nold\n<!-- end -->\nafter\n"
        self.assertTrue(page.rendered(text, [ROW]).startswith("before\n<!-- evidence: small -->\n    for seed"))
        self.assertTrue(page.rendered(text, [ROW]).endswith("<!-- end -->\nafter\n"))
        for wrong, known in [("", [ROW]), (text, []), (text + text, [ROW])]:
            with self.assertRaises(SystemExit):
                page.rendered(wrong, known)


    def test_claims_are_summed_up_with_what_stands_behind_them(self):
        self.measure({0: 0.6, 1: 0.61})
        row = Row(**{**ROW.__dict__, "claim": "it is", "paper": "P", "published": "Fig. 1", "verdict": "yes"})
        text = "<!-- claims -->\n<!-- end -->\n# One, `two` (3.4)\n<!-- evidence: small -->\n<!-- end -->\n"
        line = "| [it is](#one-two-34) | P | Fig. 1 | softmax | 2 | yes |\n<!-- end -->"
        self.assertIn(line, page.rendered(text, [row]))


class Running(unittest.TestCase):
    def test_programs_data_and_seed_are_put_in(self):
        script = Runner(Path("/programs"), Path(), 2, "commit").script(ROW, 7)
        self.assertIn("seed=7", script)
        self.assertIn("/programs/examples/tables two --seed $seed", script)
        with mock.patch.dict("os.environ", {"RESOLVENT_DATA": "/data"}):
            self.assertEqual(placed("train --data imdb:DIR < DIR/imdb/a"), "train --data imdb:/data/imdb < /data/imdb/a")
            self.assertEqual(placed("train --data images:DIR/cifar10/a"), "train --data images:/data/cifar10/a")
        with mock.patch.dict("os.environ", clear=True), self.assertRaises(RuntimeError):
            placed("train --data imdb:DIR")

    def test_training_goes_on_where_there_are_checkpoints(self):
        with tempfile.TemporaryDirectory() as work:
            program = Path(work, "resolvent")
            program.write_text('#!/bin/sh\necho "$@"\n')
            program.chmod(0o755)
            Path(work, "runs", "old", "checkpoints").mkdir(parents=True)
            found = []
            for command in ["train --from a --out runs/old", "train --from a --out runs/new", "compare --out runs/old"]:
                row = Row(**{**ROW.__dict__, "commands": (f"resolvent {command}",)})
                with mock.patch.object(read, "figures", lambda _, __, ___, printed: found.append(printed.strip())):
                    Runner(Path(work), Path(work), 2, "commit").run(row, 0)
        resumed = ["train --out runs/old --resume --threads 2", "train --from a --out runs/new --threads 2"]
        self.assertEqual(found, [*resumed, "compare --out runs/old --threads 2"])

    def test_every_row_of_the_project_is_complete(self):
        for row in rows.load():
            self.assertTrue(row.commands and row.seeds and row.columns and row.claim and row.paper and row.verdict, row.id)
            ranks = row.control and any("$seed" in command for command in row.commands)
            self.assertTrue(not ranks or len(row.seeds) >= 3, f"{row.id} ranks by fewer than three seeds")
            self.assertLessEqual({column.against for column in row.columns}, {"", *(column.name for column in row.columns)}, row.id)
            self.assertEqual(len(row.seeds) > 1, any("$seed" in command for command in row.commands), row.id)


if __name__ == "__main__":
    unittest.main()
