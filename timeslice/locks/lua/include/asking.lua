-- A request: let in at once, queued, or refreshed; and its answer. Needs group, waiters, gangs, residency, lease, advance.
local BAND = 17592186044416 -- 2^44 ids a priority; all scores below 2^53

-- The place of an earlier entry, as its waiter brings it, or nil.
local function old_place(score)
  local place = tonumber(score)
  if place then
    check_number('score', place % BAND)
  end
  return place
end

-- Who comes new to so many that wait already is turned away. `id` is a waiter's, or that of a rank as it stands in alive.
-- One that comes back to its place, or is looked for there, is not new. The dead were reaped before, some at each call.
local function is_too_many(id, place)
  return redis.call('ZCARD', alive_key) >= WAITERS_MAX and not place and not redis.call('ZSCORE', alive_key, id)
end

local function turn_away()
  advance()
  save()
  return { 'full', digits(WAITERS_MAX) }
end

-- `record` is what is asked for; `place` puts it back where it was.
local function ask(waiter, record, place)
  local verdict, how
  if not is_closed() and redis.call('ZCARD', queue_key) == 0 then
    verdict, how = decide(record.job)
  end
  if verdict == 'grant' then
    return grant(waiter, record, how, 0, waiter)
  end
  redis.call('ZADD', alive_key, now + record.ttl_ms, waiter)
  if not redis.call('ZSCORE', queue_key, waiter) or redis.call('HEXISTS', waiters_key, waiter .. '/job') == 0 then
    if place then
      set('seq', math.max(S.seq, place % BAND)) -- after data loss: whoever comes new stays behind it
    else
      set('seq', math.max(S.seq + 1, now))
      place = (100 - record.priority) * BAND + S.seq
    end
    redis.call('ZADD', queue_key, place, waiter)
    waiter_set(waiter, record)
    emit('WaiterQueued', 'job', record.job, 'waiter', waiter, 'priority', record.priority, 'label', record.label)
  elseif redis.call('HGET', waiters_key, waiter .. '/deferred') == 'silent' then
    redis.call('HDEL', waiters_key, waiter .. '/deferred', waiter .. '/deferred_at_ms', waiter .. '/deferred_until_ms')
  end
  advance(waiter)
  if S.swap_waiter == waiter and S.swap_step == 'new' then
    wake('answered')
  end
end

-- What its client is told, for the process that asks.
local function answer(waiter, job, host, pid, start)
  local registered = is_known_there(job, host, pid, start)
  if S.lease_id == waiter then
    local needs_weights = S.mode == 'served' and job_needs_weights(job) and 1 or 0
    return { 'granted', S.token, S.how, S.swap_ms, S.counter, S.mode, registered, S.deadline_ms, needs_weights }
  end
  local reason = S.reason
  local deferred = redis.call('HGET', waiters_key, waiter .. '/deferred')
  if deferred and reason == '' and deferred ~= 'silent' then
    reason = 'deferred: ' .. deferred
  end
  local place = tonumber(redis.call('ZSCORE', queue_key, waiter)) -- nil: a gang that forms
  return {
    'queued', redis.call('ZRANK', queue_key, waiter) or 0, place and digits(place) or '', S.phase, reason, S.job,
    math.max(S.deadline_ms - now, 0), S.counter, S.mode, registered,
  }
end
