"""Every name that a log may hold: what it is and, after a semicolon, its value in a healthy run."""

GLOSSARY = {
    "step": "rollout step, from 0",
    "failed_groups": (
        "share of the groups played that were dropped because a search of theirs failed "
        "(rollout.max_failed_groups); 0"
    ),
    "drawn_groups": (
        "groups played for each that the step asked for (rollout.extra_draws); 1 means that every group "
        "differed in reward, 1 + extra_draws that some kept ones do not"
    ),
    "empty_groups": (
        "share of the groups played that were dropped because a query of theirs found nothing "
        "(retriever.empty_results); 0"
    ),
    "reward/mean": "mean reward of all episodes; rises, then levels off",
    "reward/std": (
        "mean over questions of the (unbiased) standard deviation within a group; at 0 all group-relative "
        "advantages are 0"
    ),
    "reward/mixed_groups": (
        "share of groups whose episodes differ in reward; the others have no group-relative advantage, "
        "only LLDS, KL and entropy terms"
    ),
    "em": "mean exact match of the training episodes, whatever the reward",
    "update": "optimizer step within the rollout step, from 0 (updates.jsonl)",
    "loss": (
        "the minimised sum per optimizer step; in metrics.jsonl, as all loss/*, averaged over the "
        "step's updates"
    ),
    "loss/policy": "mean surrogate term per token (Eq. 1); near 0",
    "loss/correction": (
        "mean weight of loss.correction per token; 1 where the trainer's log-probabilities are the "
        "sampler's, with top_p < 1 the kept mass"
    ),
    "loss/weight": "mean product of the rules of loss.weights per token",
    "loss/nll": "mean of the penalty nll per token: -log pi where A > 0, 0 elsewhere, times its weight",
    "loss/kl_cov": "mean of the penalty kl_cov per token: |log ratio| of the chosen tokens",
    "loss/kl": "mean estimate (loss.kl_estimator) of KL(policy || reference) per token, nats; slow growth",
    "loss/lld": "mean LLDS term per token of the model, before lambda; above 0 from the second update on",
    "lld_beta": "LLDS-MA's weight on answer tokens; 1 is plain LLDS",
    "entropy": (
        "mean entropy of the next-token distribution on the model's tokens, nats; an explosion is "
        "collapse, 0 is determinism"
    ),
    "kept_mass": (
        "probability that the trainer's policy gives to the tokens that the sampler could draw, mean over "
        'tokens; 1 unless top_p or the like cuts its distribution, and with loss.support "kept"'
    ),
    "advantage": (
        "mean advantage per token; below 0 where wrong responses are the longer ones, in healthy runs too"
    ),
    "advantage/*": "the same by context: above 0 where passages helped, below where they did not",
    "drift": (
        "predicted change of entropy per unit of step from what the sampler cuts: the mean of -A (1 - m) pi "
        "(log pi + H), m being the kept mass (`drift` in lld/record/contexts.py); 0 if nothing is cut, "
        "above 0 flattens"
    ),
    "drift/*": "the same by context; what contexts have in common drifts as they do on average",
    "context/*": "share of the model's tokens in that context",
    "*/first": (
        "kept mass, entropy, or by class entropy, log pi and displacement, over the tokens sampled before "
        "their episode had read a passage"
    ),
    "*/lucky": "the same over the tokens whose episode had read a passage that holds a gold answer",
    "*/unlucky": "the same over the tokens whose episode had read passages, none with a gold answer",
    "entropy/*": (
        "entropy by class of response: A > 0 (correct), A < 0 (incorrect), A = 0 (neutral); should fall in "
        "all, and if it rises for incorrect ones look at drift"
    ),
    "grad_norm": "mean gradient norm before clipping over the step's updates",
    "grad_norm_max": "largest gradient norm of the step's updates",
    "skipped_updates": "updates not made because their loss or gradient was not finite; 0",
    "lr": "learning rate of the step",
    "ratio/mean": "mean of pi/pi_old over tokens; near 1",
    "ratio/max": "largest pi/pi_old of a token",
    "ratio/q999": "its 99.9 % quantile, the tail that widens before a collapse",
    "ratio/clipped": "share of tokens whose gradient the clip removed; below 0.1",
    "likelihood/correct_old": "mean log pi_old per token of responses with A > 0, nats",
    "likelihood/correct_new": "the same under the policy at the moment of its update",
    "likelihood/incorrect_old": "mean log pi_old per token of responses with A < 0",
    "likelihood/incorrect_new": "the same under the policy at the moment of its update",
    "likelihood/neutral_old": (
        "mean log pi_old per token of responses with A = 0 (all-correct and all-wrong groups)"
    ),
    "likelihood/neutral_new": "the same under the policy at the moment of its update",
    "displacement/correct": (
        "mean of log pi - log pi_old per token of responses with A > 0; steadily below "
        "0 is lazy likelihood displacement"
    ),
    "displacement/incorrect": "the same for A < 0; below 0 is what the update asks for",
    "displacement/neutral": "the same for A = 0",
    "displacement/*/per_action": "mean over actions of the sum over their tokens (Def. 4.1)",
    "displacement/*/per_response": "mean over responses of the sum over their tokens (Eq. 2)",
    "displacement/*/q*": "quantiles (5, 50, 95 %) of the displacement of a token",
    "displacement/*/*/turn*": "mean per token on the thinking, tool or answer part of the turn-th action",
    "displaced/*": (
        "share of tokens, actions or responses of the class whose likelihood fell by more than "
        "1e-5 nats a token in float32, 3e-3 in bf16 (NOISE in lld/record/monitor.py)"
    ),
    "final/*": (
        "displacement and share displaced once more, from before the first to after the last update "
        "of the rollout (Def. 4.1)"
    ),
    "gate/*/open": (
        "share of the tokens of responses with A >= 0 on which this gate of LLDS opens, whether "
        "LLDS is on or not"
    ),
    "gate/*/penalty": "mean LLDS term per such token under this gate, before lambda",
    "nll/searches*": (
        "mean negative log-likelihood per token of responses with that many searches, before "
        "the update (Fig. 6)"
    ),
    "wrong/first_action": "mean log-likelihood per token of the first action of wrong episodes (Fig. 5)",
    "wrong/second_action": (
        "the same of the second action of those that began with a search: it has read the passages"
    ),
    "wrong/observation_match": (
        "share, among wrong episodes that began with a search and whose question "
        "also has a right one, of those whose first search found the passages of a "
        "right one (Fig. 5)"
    ),
    "sentinel/likelihood": (
        "mean log-likelihood per token, re-scored, of at most monitor.sentinel_size "
        "correct episodes of the first rollout that has one"
    ),
    "sentinel/displacement": (
        "its change since they were sampled; a fall is forgetting or displacement that stayed"
    ),
    "phase": "0 healthy, 1 displacement, 2 flattening, 3 spiral, 4 collapse (lld/record/phases.py)",
    "sampler_gap/mean": (
        "mean |log p(trainer) - log p(sampler)| per token before the first update; "
        "float32: below 1e-5, bf16: below .003 (more with top_p < 1: the sampler cuts its "
        "distribution)"
    ),
    "sampler_gap/max": "largest such gap; float32: below 1e-4, bf16: about .1",
    "searches": "searches carried out per episode",
    "calls/*": "calls of a further tool (`lld/tools.py`) whose result was read, per episode",
    "turns": "actions per episode",
    "valid_actions": "share of actions that were a tool call or an answer",
    "valid_searches": "share of the actions that are no answer which are well-formed searches (Fig. 4)",
    "answered": "share of episodes that ended with an answer",
    "truncated": "share of episodes that ran out of context, or of a turn's token budget",
    "cut_passages": "passages shortened to fit the observation budget, per search",
    "response_tokens": "model-written tokens per episode",
    "episode_tokens": "tokens per episode, prompt and observations included",
    "gold_in_results": (
        "share of episodes (yes/no questions left out) in which some retrieved passage holds a gold answer"
    ),
    "eval/*/em": "exact match on held-out questions, greedy unless eval.temperature says otherwise",
    "eval/*/f1": "token F1 on them",
    "eval/*/cover_em": "share whose answer contains a gold answer",
    "eval/*/searches": "searches per question there",
    "eval/*/valid_action_rate": "valid actions there",
    "eval/*/truncation_rate": "truncated episodes there",
    "eval/*/answered_rate": "episodes with an answer there",
    "eval/*/gold_in_results": "episodes whose passages hold a gold answer there",
    "eval/*/num_questions": "questions asked there",
    "time/rollout_s": "seconds of sampling and searching",
    "time/search_s": (
        "seconds of the rollout inside the search function (overlaps with sampling where "
        "rollout.overlap_search)"
    ),
    "time/update_s": "seconds of scoring and updating",
    "time/monitor_s": "seconds of computing and writing what the recorder logs",
    "time/rescore_s": "seconds of re-scoring after the last update, and of the sentinel",
    "time/eval_s": "seconds of evaluation",
    "time/step_s": "seconds of the whole step",
    "speed/sampled_tokens_per_s": "model-written tokens per second of rollout, per process",
    "speed/trained_tokens_per_s": (
        "tokens (prompt and observations included) per second of update, all processes"
    ),
}
