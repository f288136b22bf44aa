"""Every public function has an example in its docstring, and the example gives what it says."""

import doctest
import inspect

import pytest

import kernels_ext_npu
import softnpu

PUBLIC = {
    f"{package.__name__}.{name}": getattr(package, name)
    for package in (softnpu, kernels_ext_npu)
    for name in package.__all__
}
# in a process of its own for each example: they register kernels, count, and start process groups
RUN = """
import doctest
examples = doctest.DocTestParser().get_doctest({section!r}, {{}}, {name!r}, None, None)
doctest.DocTestRunner().run(examples)
"""


def example(public: object) -> str:
    """Return the section of a docstring that is an example, nothing where there is none."""
    return (inspect.getdoc(public) or "").partition("\nExample:\n")[2]


@pytest.mark.parametrize("name", [name for name, public in PUBLIC.items() if inspect.isfunction(public)])
def test_a_public_function_has_an_example_that_calls_it_and_shows_a_result(name: str) -> None:
    steps = doctest.DocTestParser().get_examples(example(PUBLIC[name]))
    assert any(f"{name}(" in step.source for step in steps)
    assert any(step.want for step in steps)


def test_the_examples_give_what_they_say(run_forked) -> None:
    sections = {name: section for name, public in PUBLIC.items() if (section := example(public))}
    runs = [run_forked(RUN.format(name=name, section=section)) for name, section in sections.items()]
    failures = [run.stdout for run in runs if run.stdout]  # doctest is silent where nothing differs
    assert not failures, "\n".join(failures)
