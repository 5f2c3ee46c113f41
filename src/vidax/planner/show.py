"""A plan as text and as a picture."""

import importlib.util
from pathlib import Path
from typing import Any

from vidax.errors import UserError
from vidax.media.files import AtomicFile, claim_output, sentences

WIDTH = 14
COLOURS = {"matrix units": "#3b6ea5", "memory": "#9cb86a", "links": "#d9a441", "host link": "#b5533c"}


def cost(plan: dict[str, Any], price_per_chip_hour: float) -> float | None:
    """Of one clip, without loading and compiling."""
    seconds = plan["total_seconds"]
    return None if seconds is None else round(price_per_chip_hour * plan["chips"] * seconds / 3600, 4)


def text(plan: dict[str, Any]) -> str:
    """A plan for people, `Plan.as_json` given."""
    lines = [
        f"{plan['model']}: {plan['size']}, {plan['frames']} frames, {plan['steps']} steps of {plan['solver']}, "
        f"guidance {guidance(plan)}{from_images(plan['images'])}, {plan['dtype']}, on {plan['topology']}"
        + (f" ({plan['chips']} chips)" if plan["chips"] > 1 else ""),
        f"  mesh       {plan['mesh']} ({plan['mesh_origin']})",
        f"  residency  {plan['residency']} ({plan['residency_origin']})",
        "",
        f"  {'phase':{WIDTH}} {'GB of each':>10} {'on the host':>11} {'seconds':>9}  {'bound by':13} known as",
    ]
    for phase in plan["phases"]:
        how = phase["known_as"]
        if phase["compile_seconds"] is not None:
            how += f" in {phase['compile_seconds']:g} s"
        if phase["name"] == "denoise" and plan["step_seconds"] is not None:
            how += f"; {plan['step_seconds']:.4g} s a step"
        lines.append(
            f"  {phase['name']:{WIDTH}} {gb(phase['device_gb']):>10} {gb(phase['host_gb']):>11} "
            f"{number(phase['seconds']):>9}  {phase['bound'] or '-':13} {how}"
        )
    lines += [
        f"  {'in all':{WIDTH}} {gb(plan['peak_device_gb']):>10} {'':11} {number(plan['total_seconds']):>9}",
        "",
        f"  {verdict(plan)}",
    ]
    if "cost_per_clip" in plan:
        lines.append(f"  a clip costs {number(plan['cost_per_clip'])}")
    for other in plan["others"]:
        lines.append(
            f"  also       {other['mesh']}, {other['residency']}: {number(other['step_seconds'])} s a step, "
            f"{gb(other['peak_device_gb'])} GB" + ("" if other["fits"] is not False else ", does not fit")
        )
    lines += [f"  note       {sentence}" for sentence in plan["advice"]]
    return "\n".join(lines)


def guidance(plan: dict[str, Any]) -> str:
    """Of two experts that of each."""
    scales = plan["guidance_scale"], plan.get("guidance_scale_2")
    return " and ".join(f"{scale:g}" for scale in scales if scale is not None)


def from_images(count: int) -> str:
    return f", from {count} image{'s' if count > 1 else ''}" if count else ""


def verdict(plan: dict[str, Any]) -> str:
    peak = gb(plan["peak_device_gb"])
    if plan["fits"] is None:
        return f"takes {peak} GB; nothing says how much there is"
    limit = gb(plan["limit_gb"])
    if plan["fits"]:
        return f"fits: {peak} of {limit} GB of each device"
    return f"does not fit: {peak} GB where each device has {limit} GB"


def gb(value: float) -> str:
    return f"{value:.2f}" if value >= 1 or not value else f"{value:.2g}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def claim_plot(path: Path, *, overwrite: bool) -> None:
    """Check that a picture can be drawn, before the work starts. Raises UserError."""
    claim_output(path, overwrite=overwrite)
    if path.suffix != ".png":
        raise UserError(f"{path}: a plan is drawn as a PNG; name a .png file")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"{path}: a picture takes matplotlib; pip install 'vidax[plan]' brings it")


def plot(plans: list[dict[str, Any]], path: Path, *, overwrite: bool) -> Path:
    """A picture: memory of each phase against the limit, and seconds of each by what they are spent on; a row for each
    plan.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 2.6 * len(plans)), layout="constrained")
    rows = figure.subplots(len(plans), 2, squeeze=False)
    for (memory, time), plan in zip(rows, plans, strict=True):
        names = [phase["name"] for phase in plan["phases"]]
        own = [phase["device_gb"] - phase["weights_gb"] for phase in plan["phases"]]
        weights = [phase["weights_gb"] for phase in plan["phases"]]
        memory.barh(names, weights, color=COLOURS["matrix units"], label="weights")
        memory.barh(names, own, left=weights, color=COLOURS["memory"], label="everything else")
        if plan["limit_gb"] is not None:
            memory.axvline(plan["limit_gb"], color="black", linestyle="--", label="a device has")
        memory.set_xlabel("GB of each device")
        memory.set_title(
            f"{plan['model']}, {plan['size']}x{plan['frames']}, {plan['topology']}, {plan['mesh']}", size=9
        )
        before = [0.0] * len(names)
        for limit, colour in COLOURS.items():
            spent = [(phase["seconds_by"] or {}).get(limit, 0.0) for phase in plan["phases"]]
            time.barh(names, spent, left=before, color=colour, label=limit)
            before = [sum(both) for both in zip(before, spent, strict=True)]
        time.set_xlabel("seconds")
        time.set_title(verdict(plan), size=9)
        for axes in (memory, time):
            axes.invert_yaxis()
            axes.legend(fontsize=7)
    with sentences(path), AtomicFile(path, overwrite=overwrite) as file:
        figure.savefig(file.temporary, format="png", dpi=110)
    return file.path
