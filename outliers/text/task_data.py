"""Names of zero-shot tasks and of the data sets behind them, in a module that imports quickly."""

from pathlib import Path

from outliers.errors import UserError
from outliers.text.documents import check_data_set

FOLDER = Path(__file__).parent / "tasks"
LOCAL_TASKS = tuple(sorted(file.stem for file in FOLDER.glob("*.yaml")))
FIGURE1_TASKS = {  # tasks of the harness, and their data sets on the hub
    "hellaswag": "Rowan/hellaswag",
    "piqa": "baber/piqa",
    "winogrande": "allenai/winogrande",
    "lambada_openai": "EleutherAI/lambada_openai",
}


def check_task(name: str) -> None:
    """Raise UserError if the name is that of a task of the paper's Figure 1 (`FIGURE1_TASKS`) whose data cannot be
    reached, before slow imports."""
    if name in FIGURE1_TASKS:
        try:
            check_data_set(FIGURE1_TASKS[name])
        except Exception as error:  # each version of the hub's client raises its HTTP library's own errors
            raise no_data(name, FIGURE1_TASKS[name], error) from None


def no_data(task: str, repository: str, error: Exception) -> UserError:
    return UserError(
        f"cannot load the data of task '{task}', '{repository}' on the hub ({type(error).__name__}); check the "
        f"network, set HF_HUB_OFFLINE=1 to use the local cache, or use {' and '.join(LOCAL_TASKS)} with local files"
    )
