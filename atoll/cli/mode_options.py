"""Options of `atoll run` that belong to modes: made from the modes' option structs, and refused for a mode that does not have them.

A field's type and default are the option's; its description is the help. `extra` may have a `metavar`, `min` and `max`, and in `only` half
a sentence that says why other modes lack it. An option that is a field of Plan too says what the plan has there.
"""

import inspect
from collections.abc import Callable, Mapping
from copy import copy
from functools import wraps
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import typer

from atoll.errors import JobError
from atoll.plan import Plan
from atoll.plan.modes import ModeRules, installed_modes, mode_names
from atoll.runtime.run_directory import RunSettings

__all__ = ["apply_to_plan", "chosen_options", "is_given", "with_modes"]


def with_modes(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the modes there are as choices of `--mode`, and where it takes `options`, with those of all modes.

    As `options` it gets what was given of them.
    """
    own = inspect.signature(command, eval_str=True).parameters
    modes = installed_modes() if "options" in own else ()
    added = {name: _parameter(name, rules) for rules in modes for name in rules.options.__struct_fields__}

    @wraps(command)
    def run(**values: Any) -> None:
        given = {name: values.pop(name) for name in added}
        options = {name: value for name, value in given.items() if is_given(values["context"], name)}
        command(**values, **({"options": options} if "options" in own else {}))

    kept = {**own, "mode": own["mode"].replace(annotation=_choice(own["mode"].annotation))}
    kept.pop("options", None)
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (kept | added).values()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def is_given(context: typer.Context, option: str) -> bool:
    """Whether an option was given, and has not just its default."""
    source = context.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"


def _choice(annotation: Any) -> Any:
    """The option `--mode` with the modes there are and what they say of themselves."""
    option = copy(get_args(annotation)[1])
    option.help = f"{option.help} {'; '.join(f'{rules.name}: {rules.summary}' for rules in installed_modes())}."
    names: Any = Literal[mode_names()]
    return Annotated[names | None, option]


def _meta(rules: ModeRules, name: str) -> tuple[Any, msgspec.Meta]:
    annotation = get_type_hints(rules.options, include_extras=True)[name]
    kind, *metas = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    return kind, next((meta for meta in metas if isinstance(meta, msgspec.Meta)), msgspec.Meta())


def _parameter(name: str, rules: ModeRules) -> inspect.Parameter:
    kind, meta = _meta(rules, name)
    default = next(field.default for field in msgspec.structs.fields(rules.options) if field.name == name)
    if get_origin(kind) is tuple:
        kind, default = list[get_args(kind)[0]] | None, None  # type: ignore[misc]
    about, panel = meta.extra or {}, f"With --mode {rules.name}"
    shown = about.get("metavar")
    option = typer.Option(help=meta.description, metavar=shown, rich_help_panel=panel, min=about.get("min"), max=about.get("max"))
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def chosen_options(rules: ModeRules, given: Mapping[str, Any], before: RunSettings | None) -> msgspec.Struct:
    """The mode's options: as given, else as a run that is resumed in the same mode had them. JobError for another mode's.

    What a plan says too is not kept: the run's plan has it, and another that is given goes before it.
    """
    for name in given:
        if name not in rules.options.__struct_fields__:
            raise JobError(_not_its_own(name, rules))
    had = before.options if before is not None and before.mode == rules.name else {}
    kept = {name: value for name, value in had.items() if name not in Plan.__struct_fields__}
    try:
        return msgspec.convert({**kept, **given}, rules.options)
    except msgspec.ValidationError as error:
        raise JobError(f"run.json: options of mode {rules.name}: {error}; give them anew, or start a new run") from None


def _not_its_own(name: str, rules: ModeRules) -> str:
    having = [other for other in installed_modes() if name in other.options.__struct_fields__]
    modes = " or ".join(f"`--mode {other.name}`" for other in having)
    _, meta = _meta(having[0], name)
    why = (meta.extra or {}).get("only", f"mode {rules.name} has no such option")
    return f"`--{name.replace('_', '-')}` needs {modes}: {why}"


def apply_to_plan(plan: Plan, options: msgspec.Struct, before: Plan | None) -> tuple[Plan, msgspec.Struct]:
    """Plan and options that agree: what an option says goes, else what the plan of before had, else what the plan has."""
    for name in options.__struct_fields__:
        if name in Plan.__struct_fields__:
            value = getattr(options, name)
            if value is None:
                value = getattr(plan if before is None else before, name)
            plan, options = msgspec.structs.replace(plan, **{name: value}), msgspec.structs.replace(options, **{name: value})
    return plan, options
