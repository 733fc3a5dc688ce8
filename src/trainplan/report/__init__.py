"""Answers for people: tables, timelines, traces, explanations, predicted beside measured."""
