from lld.data.questions import load_benchmark, load_questions, questions_of_step

__all__ = ["load_benchmark", "load_questions", "questions_of_step"]
