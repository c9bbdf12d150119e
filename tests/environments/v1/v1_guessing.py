"""A game: a number is guessed, told by `higher` and `lower`, and the game's end is the reward."""

import random

import verifiers.v1 as vf

__all__ = ["GuessingEnv", "GuessingTaskset"]


class GuessingData(vf.TaskData):
    seed: int


class GuessingEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=4)
    highest: int = 9


class GuessingEnv(vf.Env[GuessingEnvConfig]):
    async def run(self, task, agents):
        random.seed(task.data.seed)  # as games do that draw from the global generator
        secret, told = random.randint(1, self.config.highest), 0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and int(segment.last_reply) != secret:
                told += 1
                word = "higher" if int(segment.last_reply) < secret else "lower"
                segment = await interaction.turn(f"{word} ({told})")
        interaction.trace.record_reward("found", 0.0 if segment.terminated else 1 - told / 4)

    async def finalize(self, task, episode):
        episode.traces[0].record_metric("turns", episode.traces[0].num_turns)


class GuessingTaskset(vf.Taskset[vf.Task[GuessingData], vf.TasksetConfig]):
    def load(self):
        prompt = [vf.UserMessage(content="1?"), vf.AssistantMessage(content="yes"), vf.UserMessage(content="Guess!")]
        return [vf.Task(GuessingData(seed=seed, prompt=prompt)) for seed in range(4)]
