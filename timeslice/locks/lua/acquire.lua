--[[
Asks for the group, or refreshes a wait. The same waiter id always gets the same answer.
ARGV  1 floor  2 waiter  3 job  4 host  5 pid  6 start  7 priority  8 label  9 lease_ms  10 ttl_ms
      11 'lock' to declare the group lock-only, else ''  12 score of an earlier entry, or ''
Reply granted token how swap_ms counter mode registered deadline_ms
      queued position score phase reason holder holder_ms counter mode registered
      ended | mode <mode of the group>
Events LeaseGranted, WaiterQueued, and what advance and reap emit
--]]
-- @include group waiters residency lease advance
local waiter, job, host, pid, start = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local priority, label, lease_ms, ttl_ms = tonumber(ARGV[7]), ARGV[8], tonumber(ARGV[9]), tonumber(ARGV[10])
local wanted_mode, old_score = ARGV[11], tonumber(ARGV[12])
local BAND = 17592186044416 -- 2^44 ids a priority; all scores below 2^53

begin(false, FIELD_MAX)
if old_score then
  check_number('score', old_score % BAND)
end
if has_ended(waiter) then
  return { 'ended' }
end
if wanted_mode ~= '' and S.mode ~= '' and S.mode ~= wanted_mode then
  return { 'mode', S.mode }
end
settle_clock()
if S.mode == '' and wanted_mode ~= '' then
  set('mode', wanted_mode)
end
if S.lease_id == waiter and S.deadline_ms >= now then
  set('confirmed', '1') -- it asks itself, so it lives
  set('renewed_at_ms', now)
  set('deadline_ms', now + S.lease_ms)
else
  reap()
  local record = {
    job = job, host = host, pid = pid, start = start, label = label, lease_ms = lease_ms, enqueued_at_ms = now, fresh = true,
  }
  local verdict, how
  if not is_closed() and redis.call('ZCARD', queue_key) == 0 then
    verdict, how = decide(job)
  end
  if verdict == 'grant' then
    grant(waiter, record, how, 0, waiter)
  else
    redis.call('ZADD', alive_key, now + ttl_ms, waiter)
    if not redis.call('ZSCORE', queue_key, waiter) or redis.call('HEXISTS', waiters_key, waiter .. '/job') == 0 then
      local score = old_score
      if score then
        set('seq', math.max(S.seq, score % BAND)) -- after data loss: whoever comes new stays behind it
      else
        set('seq', math.max(S.seq + 1, now))
        score = (100 - priority) * BAND + S.seq
      end
      redis.call('ZADD', queue_key, score, waiter)
      redis.call('HSET', waiters_key, waiter .. '/job', job, waiter .. '/host', host, waiter .. '/pid', pid,
        waiter .. '/start', start, waiter .. '/priority', priority, waiter .. '/label', label,
        waiter .. '/lease_ms', lease_ms, waiter .. '/ttl_ms', ttl_ms, waiter .. '/enqueued_at_ms', digits(now))
      emit('WaiterQueued', 'job', job, 'waiter', waiter, 'priority', priority, 'label', label)
    elseif redis.call('HGET', waiters_key, waiter .. '/deferred') == 'silent' then
      redis.call('HDEL', waiters_key, waiter .. '/deferred', waiter .. '/deferred_at_ms', waiter .. '/deferred_until_ms')
    end
    advance(waiter)
    if S.swap_waiter == waiter and S.swap_step == 'new' then
      wake('answered')
    end
  end
end
save()
local registered = 1
if S.mode == 'served' and redis.call('ZSCORE', nodes_key, host) then
  registered = is_registered(job, host, pid, start) and 1 or 0
end
if S.lease_id == waiter then
  return { 'granted', S.token, S.how, S.swap_ms, S.counter, S.mode, registered, S.deadline_ms }
end
local reason = S.reason
local deferred = redis.call('HGET', waiters_key, waiter .. '/deferred')
if deferred and reason == '' and deferred ~= 'silent' then
  reason = 'deferred: ' .. deferred
end
return {
  'queued', redis.call('ZRANK', queue_key, waiter) or 0, digits(tonumber(redis.call('ZSCORE', queue_key, waiter))), S.phase,
  reason, S.job, math.max(S.deadline_ms - now, 0), S.counter, S.mode, registered,
}
