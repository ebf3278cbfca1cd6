"""A process of its own that runs a job: `python -m tests.delta.second_process <configuration as JSON>`. Its last line
is how the run ended.
"""

import json
import sys
from pathlib import Path

from sink.config import Config
from sink.errors import RowdeltaError
from sink.run.pipeline import Pipeline
from sink.spark import session
from tests.stack.jars import ivy_to_itself


def main(path: Path) -> None:
    values = json.loads(path.read_text())
    values["spark"] = {
        "spark.master": "local[1]",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.databricks.delta.snapshotPartitions": "1",
    }
    config = Config.model_validate(values)
    with ivy_to_itself():
        spark = session.start(config)
    try:
        Pipeline(spark, config).run()
        print("done", flush=True)
    except RowdeltaError as error:
        print(type(error).__name__, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
