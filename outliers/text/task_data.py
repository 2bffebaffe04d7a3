"""The zero-shot tasks without the harness, and the places of the data of others; imported in no time."""

from pathlib import Path

from outliers.errors import UserError
from outliers.text.documents import ask_hub

FOLDER = Path(__file__).parent / "tasks"
LOCAL_TASKS = tuple(sorted(file.stem for file in FOLDER.glob("*.yaml")))
FIGURE1_TASKS = {  # of the harness, and their data sets on the hub
    "hellaswag": "Rowan/hellaswag",
    "piqa": "baber/piqa",
    "winogrande": "allenai/winogrande",
    "lambada_openai": "EleutherAI/lambada_openai",
}


def check_task(name: str) -> None:
    """See that the data of a task of Figure 1 are there, before anything is imported that reads them; others pass."""
    if name in FIGURE1_TASKS:
        try:
            ask_hub(FIGURE1_TASKS[name])
        except Exception as error:  # each version of the hub's client raises its HTTP library's own errors
            raise no_data(name, FIGURE1_TASKS[name], error) from None


def no_data(task: str, repository: str, error: Exception) -> UserError:
    """The error for a task whose data cannot be loaded."""
    return UserError(
        f"cannot load the data of task '{task}', '{repository}' on the hub ({type(error).__name__}); check the "
        f"network, set HF_HUB_OFFLINE=1 to use the local cache, or use {' and '.join(LOCAL_TASKS)} with local files"
    )
